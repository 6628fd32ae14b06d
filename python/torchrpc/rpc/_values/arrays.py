"""NumPy's arrays, scalars and dtypes of numbers, times and texts, as plain data. They are never made by NumPy's own
unpickling, which does not check what arrives. NumPy is not imported. Threads: any.
"""

import math
import re
import sys
from typing import Any

import torch

_OUT_OF_BAND_BYTES = 4096  # a smaller array costs less in the bytes of the message than as a tensor of its own
_MOST_DIMENSIONS = 64  # of NumPy's arrays
# numpy.dtype.str of numbers, times and texts, which are the dtypes that hold no objects and no fields.
_DTYPE = re.compile(
    r"(?a:\|[biu]1|[<>][iu][248]|[<>]f(2|4|8|16)|[<>]c(8|16|32)|\|S[1-9]\d{0,8}|[<>]U[1-9]\d{0,7}"
    r"|[<>][mM]8(\[\d{0,6}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)"
)


def is_of_numpy(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and (kind is numpy.ndarray or issubclass(kind, (numpy.generic, numpy.dtype)))


def lower_array(value: Any) -> tuple:
    """Return kind and parts of an array, a scalar or a dtype of NumPy.

    Raises:
        TypeError: its dtype holds objects or fields.
    """
    numpy: Any = sys.modules["numpy"]
    if isinstance(value, numpy.dtype):
        return "dtype", _name_of(value)
    array = numpy.asarray(value, order="K")
    is_fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    flat = numpy.ascontiguousarray(array.T if is_fortran else array).reshape(-1)
    if flat.nbytes < _OUT_OF_BAND_BYTES:
        data: Any = flat.tobytes()
    else:
        data = torch.from_numpy((flat if flat.flags.writeable else flat.copy()).view(numpy.uint8))
    if isinstance(value, numpy.generic):
        return "scalar", _name_of(array.dtype), data
    return "array", _name_of(array.dtype), array.shape, is_fortran, data


def _name_of(dtype: Any) -> str:
    if dtype.hasobject or not _DTYPE.fullmatch(dtype.str):
        raise TypeError(
            f"NumPy's dtype {dtype} is not sent in this form: send arrays of numbers, times or texts, "
            "or a list of the elements"
        )
    return dtype.str


def make_dtype(name: Any) -> Any:
    """Return the dtype of that name. Raises ValueError for one that `lower_array` does not send."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        raise ValueError("this process has not loaded NumPy")
    if type(name) is not str or not _DTYPE.fullmatch(name):
        raise ValueError("no dtype of numbers, times or texts")
    return numpy.dtype(name)


def make_array(name: Any, shape: Any, is_fortran: Any, data: Any) -> Any:
    """Return a writable array. Raises ValueError unless the bytes fit dtype and shape."""
    dtype = make_dtype(name)
    if not are_sizes(shape):
        raise ValueError("the shape of an array must be numbers")
    if type(data) is torch.Tensor and data.dtype == torch.uint8 and data.device.type == "cpu" and data.dim() == 1:
        if not data.is_contiguous() or data.layout != torch.strided:
            raise ValueError("the bytes of an array must lie side by side")
        data = data.detach().numpy()
    elif type(data) is bytes:
        data = sys.modules["numpy"].frombuffer(bytearray(data), "u1") if data else _no_bytes()
    else:
        raise ValueError("the bytes of an array must be bytes")
    if data.nbytes != dtype.itemsize * math.prod(shape):
        raise ValueError("the bytes of an array must fit its dtype and shape")
    array = data.view(dtype)
    return array.reshape(shape[::-1]).T if is_fortran is True else array.reshape(shape)


def are_sizes(sizes: Any) -> bool:
    """Whether this can be the sizes of an array or a tensor that a peer has sent. Their product takes little time."""
    return (
        type(sizes) is tuple
        and len(sizes) <= _MOST_DIMENSIONS
        and all(type(size) is int and 0 <= size < 1 << 63 for size in sizes)
    )


def _no_bytes() -> Any:
    return sys.modules["numpy"].empty(0, "u1")


def make_scalar(name: Any, data: Any) -> Any:
    return make_array(name, (), False, data)[()]
