"""The memory that a worker uses does not grow with the number of its calls."""

import ctypes
import gc
import itertools

import pytest
import torch

import torchrpc.rpc as rpc
from torchrpc.testing import workers

LARGE = {"tensor": torch.ones(1 << 18), "bytes": bytes(1 << 20), "text": "x" * (1 << 20), "list": [0.5] * (1 << 12)}
ROUNDS, CALLS = 3, 300
MOST_BYTES_PER_CALL = 64


class MallocInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()  # noqa: SIM905
    ]


_LIBC = ctypes.CDLL(None)
pytestmark = pytest.mark.skipif(not hasattr(_LIBC, "mallinfo2"), reason="needs mallinfo2() of glibc 2.33")
if hasattr(_LIBC, "mallinfo2"):
    _LIBC.mallinfo2.restype = MallocInfo


def used_bytes():
    gc.collect()
    info = _LIBC.mallinfo2()
    return info.uordblks + info.hblkhd


def echo(value):
    return value


def fail(value):
    raise ValueError("on purpose")


def call_and_fail(value):
    with pytest.raises(ValueError, match="on purpose"):
        rpc.rpc_sync("worker1", fail, (value,))


WAYS = {
    "rpc_sync": lambda value: rpc.rpc_sync("worker1", echo, (value,)),
    "rpc_async": lambda value: rpc.rpc_async("worker1", echo, (value,)).wait(),
    "remote": lambda value: rpc.remote("worker1", echo, (value,)).to_here(),
    "itself": lambda value: rpc.rpc_sync("worker0", echo, (value,)),
    "failing": call_and_fail,
}


@pytest.fixture(scope="module", params=["native", "tcp"])
def group(request):
    with workers(2, transport=request.param):
        yield


@pytest.mark.parametrize(
    ("way", "kind"), [*(("rpc_sync", kind) for kind in LARGE), *((way, "tensor") for way in WAYS if way != "rpc_sync")]
)
def test_memory_is_flat_over_many_calls(group, way, kind):
    used = []
    for _ in range(ROUNDS + 1):  # what is made once is made in the first round
        for _ in range(CALLS):
            WAYS[way](LARGE[kind])
        used.append((used_bytes(), rpc.rpc_sync("worker1", used_bytes)))
    for of_worker in zip(*used, strict=True):
        growth = [after - before for before, after in itertools.pairwise(of_worker)]
        assert min(growth) < CALLS * MOST_BYTES_PER_CALL, growth
