"""Two workers on aarch64 use each part of the API once; tools/aarch64.sh runs them in the emulator.

    python tools/aarch64_smoke.py RANK PORT [tcp]

The last argument makes the workers use TCP; by default they share memory, as workers of one host do.
"""

import sys

import torch

import torchrpc.autograd as dist_autograd
import torchrpc.rpc as rpc

LARGE_FLOATS = 300_000  # more than a MiB: over shared memory, the data are in a slab


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> int:
        self.count += number
        return self.count


def twice(tensor: torch.Tensor) -> torch.Tensor:
    return 2 * tensor


def check_calls() -> None:
    assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
    futures = [rpc.rpc_async("worker1", twice, args=(torch.full((2,), float(i)),)) for i in range(20)]
    assert [future.wait().tolist() for future in futures] == [[2.0 * i] * 2 for i in range(20)]


def check_large_tensors() -> None:
    sent = torch.arange(LARGE_FLOATS, dtype=torch.float32)
    assert torch.equal(rpc.rpc_sync("worker1", twice, args=(sent,)), 2 * sent)


def check_errors() -> None:
    try:
        rpc.rpc_sync("worker1", divmod, args=(1, 0))
    except ZeroDivisionError:
        return
    raise AssertionError("the exception of the callee was not raised")


def check_rrefs() -> None:
    counter = rpc.remote("worker1", Counter)
    assert counter.rpc_sync().add(2) == 2
    assert counter.rpc_async().add(3).wait() == 5
    assert rpc.remote("worker1", twice, args=(torch.ones(1),)).to_here().item() == 2


def check_autograd() -> None:
    weights = torch.full((3,), 3.0, requires_grad=True)
    with dist_autograd.context() as context:
        product = rpc.rpc_sync("worker1", torch.mul, args=(weights, weights))
        loss = rpc.rpc_sync("worker1", twice, args=(product,)).sum()
        dist_autograd.backward(context, [loss])
        assert dist_autograd.get_gradients(context)[weights].tolist() == [12.0] * 3


def main(rank: int, port: int, transport: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}",
        rpc_timeout=300,
        **({"_transports": ["uv"], "_channels": ["basic"]} if transport == "tcp" else {}),
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        for check in (check_calls, check_large_tensors, check_errors, check_rrefs, check_autograd):
            check()
            print(f"passed  {transport}: {check.__name__.removeprefix('check_')}", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "shared memory")
