"""Measures FAST and SMART backward passes on several graphs of calls. Interleaves all cases in one run; prints medians.

    python benchmarks/backward_modes.py [--rounds 2000]

A round creates a context, runs a forward and a backward pass and ends the context. worker0 has the roots; the other
workers are processes on this machine. FAST cannot run the graph with an unused result.
"""

import argparse
import statistics
import time

import torch
from tqdm import trange

import torchrpc.autograd as dist_autograd
import torchrpc.rpc as rpc
from torchrpc.testing import workers

MODES = ("fast", "smart")


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5


def calls_worker2(x: torch.Tensor) -> torch.Tensor:
    """Runs on worker1 and calls worker2, so worker0 does not know all messages that the roots depend on."""
    return rpc.rpc_sync("worker2", scaled, (x,)) + x


def one_call(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker1", torch.mul, (x, 0.5))


def eight_calls(x: torch.Tensor) -> torch.Tensor:
    futures = [rpc.rpc_async(f"worker{1 + i % 2}", torch.mul, (x, 0.5)) for i in range(8)]
    return sum(future.wait() for future in futures)


def three_in_a_row(x: torch.Tensor) -> torch.Tensor:
    """Make three calls, each with the result of the previous call."""
    for worker in (1, 2, 1):
        x = rpc.rpc_sync(f"worker{worker}", torch.mul, (x, 0.5))
    return x


def nested(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker1", calls_worker2, (x,))


def unused_result(x: torch.Tensor) -> torch.Tensor:
    rpc.rpc_sync("worker2", torch.mul, (x, 0.5))
    return rpc.rpc_sync("worker1", torch.mul, (x, 0.5))


GRAPHS = {
    "one call": (one_call, MODES),
    "8 calls to 2 workers": (eight_calls, MODES),
    "3 calls in a row": (three_in_a_row, MODES),
    "a nested call": (nested, MODES),
    "a result not used": (unused_result, ("smart",)),
}


def once(forward, mode: str, x: torch.Tensor) -> tuple[float, float]:
    """Run a round; return the seconds of the forward and of the backward pass."""
    with dist_autograd.context() as context_id:
        begin = time.perf_counter()
        loss = forward(x).sum()
        between = time.perf_counter()
        dist_autograd.backward(context_id, [loss], mode=mode)
        return between - begin, time.perf_counter() - between


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--size", type=int, default=64, help="elements of the tensor that is sent")
    arguments = parser.parse_args()
    cases = [(name, forward, mode) for name, (forward, modes) in GRAPHS.items() for mode in modes]
    times: dict[tuple[str, str], list[tuple[float, float]]] = {(name, mode): [] for name, _, mode in cases}
    x = torch.ones(arguments.size, requires_grad=True)
    with workers(3, timeout=3600):
        for _, forward, mode in cases * 20:
            once(forward, mode, x)
        for _ in trange(arguments.rounds):
            for name, forward, mode in cases:
                times[name, mode].append(once(forward, mode, x))
    print(f"| {'shape':<20} | mode  | forward, us | backward, us |\n|-|-|-|-|")
    for (name, mode), rounds in times.items():
        forward, backward = (1e6 * statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"| {name:<20} | {mode:<5} | {forward:>11.0f} | {backward:>12.0f} |")


if __name__ == "__main__":
    main()
