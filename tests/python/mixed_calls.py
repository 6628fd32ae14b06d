"""Makes mixed calls between two workers and compares each result with that of a local call.

    python tests/python/mixed_calls.py [--calls 1000] [--seed 0] [--largest 64]

Every kind of callable (operator, plain Python function, one whose arguments need pickle, lambda) is called in every way
(rpc_sync, rpc_async, remote) with tensors of every layout and dtype, from 0 bytes to `--largest` MiB.
"""

import argparse
import random
import time
from collections import Counter, namedtuple

import torch

import torchrpc.rpc as rpc
from torchrpc.testing import workers

Pair = namedtuple("Pair", "first second")
KINDS = ["operator", "plain", "pickled", "lambda"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
LAYOUTS = ["dense", "strided", "transposed", "expanded", "zero-size", "sparse"]


def plain(tensor, options):
    return [tensor, {"name": options["name"] * 2, "count": options["count"] + 1}, tensor.dtype]


def pickled(pair, extra):
    return Pair(pair.second, (pair.first, sorted(extra)))


def make_tensor(rng, size, dtype, layout):
    """Return a tensor with about `size` bytes of storage; `rng` determines its values."""
    count = max(size // dtype.itemsize, 1)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    flat = torch.randint(0, 2 if dtype == torch.bool else 100, (count,), generator=generator).to(dtype)
    rows = max(int(count**0.5), 1)
    square = flat[: rows * (count // rows)].view(rows, -1)
    if layout == "strided":
        return square[::2, ::3]
    if layout == "transposed":
        return square.t()
    if layout == "expanded":
        return flat[:1].expand(7)
    if layout == "zero-size":
        return flat.new_empty((0, 3))
    if layout == "sparse":
        return square[:50, :50].to_sparse()
    return flat


def equal(a, b):
    if isinstance(a, torch.Tensor):
        same = isinstance(b, torch.Tensor) and (a.shape, a.dtype, a.layout) == (b.shape, b.dtype, b.layout)
        return same and torch.equal(a.to_dense() if a.is_sparse else a, b.to_dense() if b.is_sparse else b)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


def make_call(rng, largest):
    """(kind, layout, function, arguments)"""
    kind, layout, dtype = rng.choice(KINDS), rng.choice(LAYOUTS), rng.choice(DTYPES)
    # Sizes are distributed evenly over the orders of magnitude, so few calls are large.
    tensor = make_tensor(rng, int(2 ** rng.uniform(0, largest.bit_length() - 1)), dtype, layout)
    if kind == "operator":
        if layout == "sparse" or rng.random() < 0.5:
            return kind, layout, torch.clone, (tensor,)
        return kind, layout, torch.cat, ([tensor, tensor],)
    if kind == "plain":
        return kind, layout, plain, (tensor, {"name": "é" * rng.randrange(5), "count": rng.randrange(-(2**70), 2**70)})
    if kind == "pickled":
        return kind, layout, pickled, (Pair(tensor, {1: (tensor, None)}), {rng.random() for _ in range(3)})
    k = rng.randrange(100)
    return kind, layout, lambda x: (k, x, plain(x, {"name": "n", "count": k})), (tensor,)


def run(calls, seed, largest, to="worker1"):
    """Make the calls, up to 8 at a time. Return counts by kind; AssertionError for the first result that differs."""
    rng, counts, outstanding = random.Random(seed), Counter(), []

    def check(number, kind, layout, expected, get):
        result = get()
        assert equal(result, expected), f"call {number} of seed {seed} ({kind}, {layout}) differs"

    for number in range(calls):
        kind, layout, function, args = make_call(rng, largest)
        expected = function(*args)
        mode = rng.choice(["rpc_sync", "rpc_async", "remote"])
        counts.update([kind, layout, mode])
        if mode == "rpc_sync":
            result = rpc.rpc_sync(to, function, args)
            check(number, kind, layout, expected, lambda result=result: result)
        elif mode == "rpc_async":
            outstanding.append((number, kind, layout, expected, rpc.rpc_async(to, function, args).wait))
        else:
            outstanding.append((number, kind, layout, expected, rpc.remote(to, function, args).to_here))
        if len(outstanding) > 8 or rng.random() < 0.2:
            for each in outstanding:
                check(*each)
            outstanding.clear()
    for each in outstanding:
        check(*each)
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--largest", type=int, default=64, help="MiB")
    options = parser.parse_args()
    with workers(2):
        largest = options.largest << 20
        start = time.monotonic()
        for kind in ("dense", "strided"):  # the largest size at least once
            tensor = make_tensor(random.Random(options.seed), largest, torch.float32, kind)
            assert equal(rpc.rpc_sync("worker1", plain, (tensor, {"name": "", "count": 0}))[0], tensor)
        counts = run(options.calls, options.seed, largest)
        seconds = time.monotonic() - start
    print(f"{options.calls} calls (seed {options.seed}) in {seconds:.1f} s, each result equal to a local call's")
    print(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
