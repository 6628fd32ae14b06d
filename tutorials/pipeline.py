"""Pipeline parallelism: a network split over two workers that compute at the same time.

The trainer splits each batch into parts. While the second worker computes with one part, the first worker computes
with the next part. The first worker's output goes directly to the second; the trainer only has an RRef to it. One
backward pass runs through all calls, and a DistributedOptimizer updates both halves. The number of parts affects only
the speed, since the gradients are the same; the tutorial trains with several numbers of parts and compares them.

Written for torch.distributed.*; runs unchanged on torchrpc:

    python pipeline.py                  # on torch's own RPC
    python -m torchrpc pipeline.py      # on torchrpc

On three machines (rank 0 is the trainer):

    TORCHRPC_REPLACE=1 torchrun --nnodes 3 --nproc-per-node 1 --node-rank 0, 1 or 2 --master-addr HOST
        --master-port 29500 pipeline.py

The pipeline is that of GPipe (Huang et al., 2019), with two stages.
"""

import argparse
import itertools
import os
import socket
import threading
import time

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional as F
from tqdm import trange


def load_data(seed):
    """Load images (n, 64) in 0..1 and labels (n,): one part for training, one for the test."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


# --- The workers ---
# Each worker has one half of the network. `forward` accepts an RRef, so the second worker fetches its input directly
# from the first worker, not through the trainer. With the lock, a worker computes one part of a batch at a time.


class Stage(nn.Module):
    """One half of the network, on a worker. Calls for the parts of a batch run on several threads at the same time."""

    def __init__(self, sizes, seed):
        super().__init__()
        torch.manual_seed(seed)
        first, second = (nn.Linear(*pair) for pair in itertools.pairwise(sizes))
        self.layers = nn.Sequential(first, nn.ReLU(), second)
        self.lock = threading.Lock()

    def forward(self, x):
        """Return the output for `x`, a tensor or an RRef to one."""
        if not isinstance(x, torch.Tensor):
            x = x.to_here()
        with self.lock:  # one part at a time, so that the first part is finished as early as possible
            return self.layers(x)

    def parameter_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.parameters()]


# --- The trainer ---
# The trainer starts all parts at once with `rpc_async`, and gets their outputs as futures. While the second
# stage works on part one, the first stage works on part two.


class Pipeline:
    def __init__(self, options):
        size = options.size
        self.first = rpc.remote("worker1", Stage, args=([64, size, size], options.seed))
        self.second = rpc.remote("worker2", Stage, args=([size, size, 10], options.seed + 1))

    def forward(self, images, parts):
        outputs = []
        for part in images.chunk(parts):
            hidden = self.first.remote().forward(part)  # returns at once, before the result exists
            outputs.append(self.second.rpc_async().forward(hidden))
        return torch.cat(torch.futures.wait_all(outputs))

    def parameter_rrefs(self):
        return [*self.first.rpc_sync().parameter_rrefs(), *self.second.rpc_sync().parameter_rrefs()]


def train(parts, options):
    """Train with each batch split into `parts` parts; return (losses, images per second, accuracy)."""
    (images, labels), (test_images, test_labels) = load_data(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    pipeline = Pipeline(options)
    optimizer = DistributedOptimizer(optim.SGD, pipeline.parameter_rrefs(), lr=options.lr, momentum=0.9)
    pipeline.forward(test_images, parts)  # opens all connections
    losses = []
    start = time.perf_counter()
    for _ in trange(options.steps, desc=f"{parts} parts" if parts > 1 else "whole batches"):
        batch = torch.randint(len(labels), (options.batch,), generator=generator)
        with dist_autograd.context() as context_id:
            loss = F.cross_entropy(pipeline.forward(images[batch], parts), labels[batch])
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    seconds = time.perf_counter() - start
    right = pipeline.forward(test_images, parts).argmax(dim=1) == test_labels
    return losses, options.steps * options.batch / seconds, right.float().mean().item()


# --- The results ---
# The losses are the same for any number of parts, but the speed differs. If the parts are too small, the additional
# calls cost more time than the overlap saves.


def mean(values):
    return sum(values) / len(values)


def report(results, options):
    reference = next(iter(results.values()))[0]
    for parts, (losses, rate, accuracy) in results.items():
        difference = max(abs(a - b) for a, b in zip(losses, reference, strict=True))
        print(
            f"{parts} part(s): {rate:.0f} images/s; loss {losses[0]:.3f} at the start, {mean(losses[-5:]):.3f} at the "
            f"end, at most {difference:.1e} from the first line's; accuracy {accuracy:.1%}"
        )
    print(f"curves in {options.output}")


def plot(results, options):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.style.use("seaborn-v0_8-whitegrid")
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 4.5))
    for parts, (losses, rate, _) in results.items():
        seconds = [(i + 1) * options.batch / rate for i in range(len(losses))]
        (line,) = left.plot(seconds, losses, label=f"{parts} part(s)")
        right.bar(str(parts), rate, color=line.get_color())
    left.set_xlabel("seconds")
    left.set_ylabel("cross entropy")
    left.legend()
    right.set_xlabel("parts of a batch")
    right.set_ylabel("images a second")
    left.set_title(f"two stages of {options.size} units, batches of {options.batch}")
    plt.tight_layout()
    plt.savefig(options.output, dpi=120)


# --- The processes ---
# Each process joins the group. The two workers only serve calls.


def run(rank, options):
    torch.set_num_threads(1)  # the processes share the cores
    rpc.init_rpc("trainer" if rank == 0 else f"worker{rank}", rank=rank, world_size=3)
    if rank == 0:
        results = {parts: train(parts, options) for parts in options.parts}
        plot(results, options)
        report(results, options)
    rpc.shutdown()


def launch(options, world_size):
    """Start all processes. If torchrun has started this process, run only its rank."""
    if "RANK" in os.environ:
        if int(os.environ["WORLD_SIZE"]) != world_size:
            raise SystemExit(f"These options need {world_size} processes; torchrun has {os.environ['WORLD_SIZE']}.")
        run(int(os.environ["RANK"]), options)
        return
    os.environ.setdefault("MASTER_ADDR", "localhost")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        os.environ.setdefault("MASTER_PORT", str(probe.getsockname()[1]))
    mp.spawn(run, args=(options,), nprocs=world_size)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--parts", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of parts of a batch (default %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=60, help="(default %(default)s)")
    parser.add_argument("--batch", type=int, default=512, help="images in each step (default %(default)s)")
    parser.add_argument("--size", type=int, default=1024, help="size of the layers (default %(default)s)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    parser.add_argument("--output", default="pipeline.png", help="the plot (default %(default)s)")
    launch(parser.parse_args(), world_size=3)


if __name__ == "__main__":
    main()
