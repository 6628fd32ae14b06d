"""Limits of messages, and what a peer that only announces large ones costs."""

import pytest
import torch

import torchrpc.rpc as rpc
from torchrpc.rpc import Limits, SerializationError
from torchrpc.testing import workers

MIB = 1 << 20


def length(value):
    return len(value)


def many(count):
    return [torch.ones(2) for _ in range(count)]


@pytest.mark.parametrize("transport", ["native", "tcp"])
def test_messages_larger_than_the_limits_are_refused_where_they_are_sent(transport):
    limits = Limits(message_bytes=4 * MIB, head_bytes=MIB, tensor_bytes=2 * MIB, tensors=100)
    with workers(2, transport=transport, limits=limits):
        for value in (
            torch.ones(3 * MIB, dtype=torch.uint8),
            [torch.ones(2 * MIB - 100, dtype=torch.uint8) for _ in range(3)],
            "x" * (2 * MIB),
            many(101),
        ):
            with pytest.raises(SerializationError, match=r"larger than the \d+ (allowed|that a message may carry)"):
                rpc.rpc_sync("worker1", length, args=(value,))
        with pytest.raises(SerializationError, match="larger than the 100 allowed"):
            rpc.rpc_sync("worker1", many, args=(101,))
        assert rpc.rpc_sync("worker1", length, args=(torch.ones(2 * MIB, dtype=torch.uint8),)) == 2 * MIB


def test_a_larger_limit_than_the_default_is_possible():
    with workers(2, limits=Limits(head_bytes=1 << 40, message_bytes=1 << 45, tensor_bytes=1 << 45, tensors=1 << 21)):
        assert rpc.rpc_sync("worker1", length, args=("abc",)) == 3


def test_limits_are_checked_and_shown():
    assert rpc.TensorPipeRpcBackendOptions().limits is None
    options = rpc.TensorPipeRpcBackendOptions(limits=Limits(message_bytes=1 << 30))
    assert options.limits == Limits(message_bytes=1 << 30) and "limits=Limits(message_bytes=1073741824" in repr(options)
    with pytest.raises(TypeError, match="limits must be a Limits, but is a dict"):
        rpc.TensorPipeRpcBackendOptions(limits={"message_bytes": 1 << 30})
    with pytest.raises(TypeError, match=r"Limits\(tensors=...\) must be an int"):
        Limits(tensors=1.5)
    with pytest.raises(ValueError, match=r"Limits\(tensors=...\) must not be negative"):
        Limits(tensors=-1)
    for name, least in (
        ("message_bytes", 1 << 16),
        ("head_bytes", 1 << 16),
        ("tensor_bytes", 1 << 16),
        ("tensors", 64),
    ):
        with pytest.raises(RuntimeError, match=f"limits: {name} must be at least {least}, but is {least - 1}"):
            rpc.TensorPipeRpcBackendOptions(limits=Limits(**{name: least - 1}))
        rpc.TensorPipeRpcBackendOptions(limits=Limits(**{name: least}))
