#!/usr/bin/env python3
"""Checks that tensors arrive unchanged by each way between two processes with an accelerator.

    ways.py [--device cuda]

Prints a line for each way, with the path on which the workers have agreed. Exits with 1 if a tensor was wrong, if
memory stayed lent, or if large tensors were not lent. `--device sim` is the simulated accelerator.
"""

import argparse
import multiprocessing as mp
import os
import sys
from pathlib import Path

import torch

import torchrpc.rpc as rpc
from torchrpc.testing import free_port

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
from waiting import eventually

# Name -> environment, options.
WAYS = {
    "shared memory": ({}, {}),
    "shared memory, in place": ({}, {"share_device_tensors": True}),
    "chunks": ({"TORCHRPC_SHARE_DEVICE_MEMORY": "0"}, {}),
    "chunks over TCP": ({"TORCHRPC_SHARE_DEVICE_MEMORY": "0", "TORCHRPC_TRANSPORT": "tcp"}, {}),
}
SIZES = (0, 1, 1000, 100_001, (24 << 20) + 5)  # bytes: in the message, in shared memory, in chunks
LIMIT_S = 120


def load(device):
    if device == "sim":
        sys.path.insert(0, str(Path(__file__).parents[1] / "accelerator"))
        import sim

        sim.load()


def echo(tensor):
    return tensor


def doubled(tensor):
    return tensor * 2


def tensors_of(device):
    """Return [(tensor on the CPU, the same on the device)]."""
    on_cpu = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in SIZES]
    on_cpu.append(torch.randn(3000, 1500).t()[5:])
    on_cpu.append(torch.randn(1100, 1100, dtype=torch.complex64))
    return [(tensor, tensor.to(device)) for tensor in on_cpu]


def metric(name):
    return rpc.api._get_current_rpc_agent().get_metrics()[name]


def check_values(device):
    for expected, tensor in tensors_of(f"{device}:0"):
        assert torch.equal(rpc.rpc_sync("w1", echo, (tensor,)).cpu(), expected), expected.shape
        result = rpc.remote("w1", doubled, (tensor,)).to_here()
        assert torch.equal(result.cpu(), expected * 2), expected.shape


def check_changes(device):
    """Check that a tensor may be changed as soon as rpc_async has returned."""
    tensor = torch.ones(6 << 20, device=device)
    futures = []
    for _ in range(8):
        futures.append(rpc.rpc_async("w1", doubled, (tensor,)))
        tensor.mul_(2)
    for i, future in enumerate(futures):
        assert future.wait().eq(2.0 ** (i + 1)).all().item(), i


def check(device, in_place):
    """Run all checks; return the path of the tensors."""
    path = f"device.path.w1 {device}:0"
    rpc.rpc_sync("w1", echo, (torch.ones(2, device=device),))
    eventually(lambda: "not known yet" not in metric(path))
    for _ in range(3):
        check_values(device)
    if not in_place:
        check_changes(device)
    assert int(metric("device.loans")) >= 3, "large tensors were not lent"
    for metric_of in (metric, lambda key: rpc.rpc_sync("w1", metric, (key,))):
        eventually(lambda metric_of=metric_of: metric_of("device.lent_bytes") == "0")  # no memory stays lent
    return metric(path)


def work(rank, device, way, port, found=None):
    environment, options = WAYS[way]
    os.environ.update(environment, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    load(device)
    settings = rpc.TensorPipeRpcBackendOptions(rpc_timeout=60, **options)
    settings.set_device_map(f"w{1 - rank}", {f"{device}:0": f"{device}:0"})
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=settings)
    if rank == 0:
        found.put(check(device, "share_device_tensors" in options))
    rpc.shutdown()


def run(device, way):
    """Check a way with two workers; return whether it passed."""
    context = mp.get_context("spawn")
    found, port = context.Queue(), free_port()
    workers = [context.Process(target=work, args=(rank, device, way, port, found)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(LIMIT_S)
        worker.kill()
    is_right = all(worker.exitcode == 0 for worker in workers)
    print(f"{way}: {found.get() if is_right else 'FAILED'}", flush=True)
    return is_right


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="a type of device (default cuda); sim: simulated ones")
    args = parser.parse_args()
    return 0 if all([run(args.device, way) for way in WAYS]) else 1


if __name__ == "__main__":
    sys.exit(main())
