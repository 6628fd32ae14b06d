#!/usr/bin/env python3
"""Measures tensors of an accelerator between two processes of one machine: torchrpc, torch's own RPC, plain copies.

    devices.py [--device cuda] [--sizes 4K,1M,64M,1G] [--seconds 1] [--rpc torchrpc,torch] [--variants ...]

Both workers use device 0. Rows: an echo (the tensor there and back), a tensor that the callee makes, the time that the
caller's thread is blocked in rpc_async, an echo of a CPU tensor of the same size, and a copy within the device and to
pinned host memory. torchrpc runs again with the option share_device_tensors, and with tensors that pass through host
memory, as between machines. The times are medians.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

VARIANTS = ("share_device_tensors", "through host memory")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def load(device):
    """Return the module of the device's type."""
    if device == "sim":
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "accelerator"))
        import sim

        return sim.load()
    return torch.get_device_module(device)


def echo(tensor):
    return tensor


def make(size, device):
    return torch.empty(size, dtype=torch.uint8, device=device)


def median_time(function, seconds):
    """Return the median duration of a call in seconds, after two calls that are not counted."""
    function(), function()
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        begun = time.perf_counter()
        function()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def rows_of(rpc, module, device, size, seconds):
    there = torch.ones(size, dtype=torch.uint8, device=device)
    here = torch.ones(size, dtype=torch.uint8)
    target, host = torch.empty_like(there), torch.empty_like(here)
    with contextlib.suppress(RuntimeError):  # the device has no pinned memory
        host = host.pin_memory()
    futures = []

    def start():
        futures.append(rpc.rpc_async("w1", echo, (there,)))

    def synchronized(function):
        def run():
            function()
            module.synchronize()

        return run

    rows = {"echo": median_time(synchronized(lambda: rpc.rpc_sync("w1", echo, (there,))), seconds)}
    rows["result"] = median_time(synchronized(lambda: rpc.rpc_sync("w1", make, (size, device))), seconds)
    blocked = []
    for _ in range(5):
        begun = time.perf_counter()
        start()
        blocked.append(time.perf_counter() - begun)
        futures.pop().wait()
    rows["caller blocked"] = statistics.median(blocked)
    rows["echo of a CPU tensor"] = median_time(lambda: rpc.rpc_sync("w1", echo, (here,)), seconds)
    rows["copy on the device"] = median_time(synchronized(lambda: target.copy_(there)), seconds)
    rows["copy to pinned memory"] = median_time(synchronized(lambda: host.copy_(there, non_blocking=True)), seconds)
    return rows


def work(args, rank, port):
    """Run a worker; w0 measures, and prints its rows as JSON."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    module = load(args.device)
    if args.rpc == "torchrpc":
        import torchrpc.rpc as rpc
    else:
        import torch.distributed.rpc as rpc
    in_place = {"share_device_tensors": True} if args.variant == "share_device_tensors" else {}
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=300, **in_place)
    for peer in ("w0", "w1"):
        if peer != f"w{rank}":
            options.set_device_map(peer, {f"{args.device}:0": f"{args.device}:0"})
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        found = {
            name: rows_of(rpc, module, f"{args.device}:0", size, args.seconds) for name, size in args.sizes.items()
        }
        print(json.dumps(found), flush=True)
    rpc.shutdown()


def measure(args, system, variant=""):
    from torchrpc.testing import free_port

    port = free_port()
    command = [sys.executable, __file__, "--device", args.device, "--sizes", ",".join(args.sizes), "--rpc", system]
    command += ["--seconds", str(args.seconds), "--variant", variant]
    environment = {**os.environ, "TORCHRPC_REPLACE": "0"}
    if variant == "through host memory":
        environment["TORCHRPC_SHARE_DEVICE_MEMORY"] = "0"
    workers = [
        subprocess.Popen([*command, "--rank", f"{rank},{port}"], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        output, _ = workers[0].communicate(timeout=600)
        return json.loads(output.strip().splitlines()[-1]) if workers[0].returncode == 0 else None
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="a type of device (default cuda); sim: simulated ones")
    parser.add_argument("--sizes", default="4K,64K,1M,64M,1G", help="bytes, with K, M or G (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=1, help="a row (default 1)")
    parser.add_argument("--rpc", default="torchrpc,torch", help="the systems (default %(default)s)")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="of torchrpc (default %(default)s)")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.sizes = {name: int(name[:-1]) * UNITS[name[-1]] for name in args.sizes.split(",")}
    if args.rank:
        return work(args, *map(int, args.rank.split(",")))
    systems = args.rpc.split(",")
    found = {system: measure(args, system) for system in systems}
    if "torchrpc" in systems:
        for variant in filter(None, args.variants.split(",")):
            found[f"torchrpc, {variant}"] = measure(args, "torchrpc", variant)
        systems = list(found)
    print(f"| bytes | row | {' | '.join(systems)} |\n|-|-|{'-|' * len(systems)}")
    for size in args.sizes:
        for row in next(rows for rows in found.values() if rows)[size]:
            times = [f"{rows[size][row] * 1e6:,.1f} µs" if rows else "failed" for rows in found.values()]
            print(f"| {size} | {row} | {' | '.join(times)} |")


if __name__ == "__main__":
    main()
