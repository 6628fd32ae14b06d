"""A program with all kinds of calls, whose types tests/python/test_typing.py has checked by mypy and pyright."""

import asyncio
from typing import Any

import torch
from typing_extensions import assert_type

import torchrpc
import torchrpc.rpc as rpc
from torchrpc import autograd as dist_autograd
from torchrpc.optim import DistributedOptimizer


class Server:
    """A parameter server."""

    def __init__(self, size: int) -> None:
        self.weights = torch.zeros(size)

    def push(self, gradient: torch.Tensor) -> int:
        self.weights -= gradient
        return int(gradient.numel())


def length(text: str) -> int:
    return len(text)


async def wait_and_count(count: int) -> list[int]:
    await asyncio.sleep(0.01)  # stands for work that awaits
    return list(range(count))


@rpc.functions.async_execution
def add_there(to: str, x: torch.Tensor) -> torchrpc.Future[torch.Tensor]:
    return rpc.rpc_async(to, torch.relu, args=(x,))


@torchrpc.batched
def infer(images: torch.Tensor) -> torch.Tensor:
    return images * 2


@torchrpc.batched(max_batch=8, stack=False)
def lengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


def calls() -> None:
    assert_type(rpc.rpc_sync("worker1", length, args=("a",)), int)
    assert_type(rpc.rpc_sync(1, length, args=["a"], timeout=1.5), int)
    assert_type(rpc.rpc_sync(rpc.get_worker_info("worker1"), str.upper, ("a",), {}), str)
    assert_type(rpc.rpc_async("worker1", length, args=("a",)), torchrpc.Future[int])
    assert_type(rpc.rpc_async("worker1", length, args=("a",)).wait(), int)
    assert_type(rpc.rpc_sync("worker1", wait_and_count, args=(2,)), list[int])
    assert_type(rpc.rpc_async("worker1", wait_and_count, args=(2,)).wait(), list[int])
    assert_type(rpc.rpc_sync("worker1", add_there, args=("worker2", torch.ones(2))), torch.Tensor)
    assert_type(rpc.rpc_sync("worker1", infer, args=(torch.ones(2),)), torch.Tensor)
    assert_type(rpc.rpc_sync("worker1", lengths, args=("a",)), int)
    done, pending = torchrpc.wait([rpc.rpc_async("worker1", length, args=("a",))], num_returns=1, timeout=2)
    print(len(done), len(pending))


def references() -> None:
    server = rpc.remote("worker1", Server, args=(4,))
    assert_type(server, rpc.RRef[Server])
    assert_type(server.to_here(timeout=3), Server)
    assert_type(server.owner(), rpc.WorkerInfo)
    assert_type(rpc.remote("worker1", length, args=("a",)).to_here(), int)
    mine = rpc.RRef(torch.ones(2))
    assert_type(mine.local_value(), torch.Tensor)
    assert_type(torchrpc.supervise(Server, ["worker1"], (4,)).rref(), rpc.RRef[Any])
    assert_type(torchrpc.lookup("server"), rpc.RRef[Any])
    print(server.rpc_sync().push(torch.ones(4)), server.rpc_async().push(torch.ones(4)).wait())


def value_of(each: "rpc.RRef[int] | int") -> int:
    return each.to_here() if isinstance(each, rpc.RRef) else each


def train(weight: "rpc.RRef[torch.Tensor]") -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.1)
    with dist_autograd.context() as context_id:
        assert_type(context_id, int)
        loss = weight.to_here().sum()
        dist_autograd.backward(context_id, [loss])
        assert_type(dist_autograd.get_gradients(context_id), dict[torch.Tensor, torch.Tensor])
        optimizer.step(context_id)


async def gather() -> None:
    future = rpc.rpc_async("worker1", length, args=("a",))
    assert_type(await future, int)
    assert_type(await asyncio.gather(future, future), tuple[int, int])
    assert_type(await asyncio.wait_for(future, 1), int)


def main(rank: int, world_size: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, allowed_functions=[length, "aten::*"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    try:
        calls()
    except torchrpc.RpcTimeoutError as error:
        print(error)
    assert_type(rpc.get_worker_infos(), list[rpc.WorkerInfo])
    rpc.shutdown()
