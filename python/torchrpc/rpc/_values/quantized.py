"""Quantized tensors with several elements in a byte, for which messages have no form. They are sent as tensors of
bytes, of which these functions make them again. Threads: any.
"""

import math
from typing import Any

import torch

from .arrays import are_sizes

_BITS_OF_PACKED = {torch.quint4x2: 4, torch.quint2x4: 2}  # dtypes with several elements in a byte
_DTYPES_OF_PACKED = {bits: dtype for dtype, bits in _BITS_OF_PACKED.items()}


def parts_of_packed(tensor: torch.Tensor) -> tuple | None:
    """Return the arguments of `make_packed`; None for other tensors.

    Raises:
        TypeError: it is a view of a tensor with several elements in a byte.
    """
    if tensor.dtype not in _BITS_OF_PACKED:
        return None
    if not tensor.is_contiguous() or tensor.storage_offset():
        raise TypeError(f"a view of a tensor of {tensor.dtype} cannot be sent: send what .dequantize() returns")
    if tensor.qscheme() == torch.per_tensor_affine:
        parameters: tuple = (tensor.q_scale(), tensor.q_zero_point())
    else:
        parameters = (
            tensor.q_per_channel_scales(),
            tensor.q_per_channel_zero_points(),
            tensor.q_per_channel_axis(),
        )
    return _bytes_of(tensor), _BITS_OF_PACKED[tensor.dtype], tuple(tensor.shape), *parameters


def make_packed(data: torch.Tensor, bits: int, sizes: tuple[int, ...], *parameters: Any) -> torch.Tensor:
    """Make a quantized tensor that has several elements of `bits` bits in each byte of `data`.

    Args:
        parameters: scale and zero point; or the scales, the zero points and the axis of the channels.
    """
    dtype = _DTYPES_OF_PACKED[bits]
    if len(parameters) == 2:
        scale, zero_point = parameters
        made = torch._empty_affine_quantized(sizes, scale=scale, zero_point=zero_point, dtype=dtype)
    else:
        scales, zero_points, axis = parameters
        made = torch._empty_per_channel_affine_quantized(
            sizes, scales=scales, zero_points=zero_points, axis=axis, dtype=dtype
        )
    filled = _bytes_of(made)
    if filled.shape != data.shape:
        raise ValueError(f"a tensor of {dtype} and sizes {sizes} has {filled.numel()} bytes, not {data.numel()}")
    filled.copy_(data)
    return made


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the bytes in the storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def check_packed(*parts: Any) -> None:
    """Raise ValueError unless `make_packed` can be called with these parts, which a peer has sent."""
    data, bits, sizes, *parameters = parts
    kinds = [type(part) for part in parameters]
    are_parts = type(data) is torch.Tensor and kinds in ([float, int], [torch.Tensor, torch.Tensor, int])
    _require(are_parts and bits in _DTYPES_OF_PACKED, "its bytes, its sizes, and scales and zero points")
    _require(are_sizes(sizes), "sizes that are numbers")
    count = math.prod(sizes[:-1]) * -(-sum(sizes[-1:]) * bits // 8)
    _require(data.dtype == torch.uint8 and data.shape == (count,), "bytes that fit its sizes")
    if len(kinds) == 3:
        scales, zero_points, axis = parameters
        _require(0 <= axis < len(sizes) and _are_of_size(sizes[axis], scales, zero_points), "scales of its axis's size")
    tensors = [part for part in (data, *parameters) if type(part) is torch.Tensor]
    _require(all(_has_own_memory(tensor) for tensor in tensors), "elements with memory of their own")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"a quantized tensor must be made of {what}")


def _are_of_size(size: int, *tensors: torch.Tensor) -> bool:
    return all(tensor.shape == (size,) for tensor in tensors)


def _has_own_memory(tensor: torch.Tensor) -> bool:
    """Whether each element has memory of its own. An expanded tensor of any size takes few bytes in a message."""
    return (
        tensor.layout == torch.strided and tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()
    )
