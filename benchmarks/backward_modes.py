"""What FAST and SMART backward passes cost: the modes and shapes interleaved in one run, medians.

    python benchmarks/backward_modes.py [--rounds 2000]

A round is a context, a forward pass, a backward pass and the context's end; worker0 has the roots. Other workers are
processes of this machine. FAST cannot run the shapes with an unused result.
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


def passed_on(x: torch.Tensor) -> torch.Tensor:
    """worker1 asks worker2: what the roots depend on is not known to worker0."""
    return rpc.rpc_sync("worker2", scaled, (x,)) + x


def one_call(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker1", torch.mul, (x, 0.5))


def eight_calls(x: torch.Tensor) -> torch.Tensor:
    futures = [rpc.rpc_async(f"worker{1 + i % 2}", torch.mul, (x, 0.5)) for i in range(8)]
    return sum(future.wait() for future in futures)


def there_and_back(x: torch.Tensor) -> torch.Tensor:
    """Three servers in a row, through the client."""
    for worker in (1, 2, 1):
        x = rpc.rpc_sync(f"worker{worker}", torch.mul, (x, 0.5))
    return x


def nested(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker1", passed_on, (x,))


def unused_result(x: torch.Tensor) -> torch.Tensor:
    rpc.rpc_sync("worker2", torch.mul, (x, 0.5))
    return rpc.rpc_sync("worker1", torch.mul, (x, 0.5))


SHAPES = {
    "one call": (one_call, MODES),
    "8 calls to 2 workers": (eight_calls, MODES),
    "3 calls in a row": (there_and_back, MODES),
    "a nested call": (nested, MODES),
    "a result not used": (unused_result, ("smart",)),
}


def once(forward, mode: str, x: torch.Tensor) -> tuple[float, float]:
    """Seconds of the forward and of the backward pass."""
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
    cases = [(name, forward, mode) for name, (forward, modes) in SHAPES.items() for mode in modes]
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
