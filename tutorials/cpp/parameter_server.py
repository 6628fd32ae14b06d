"""parameter_server.cpp translated to Python, to show what Python costs in each update.

python export_digits.py digits.csv
python parameter_server.py digits.csv
"""

import argparse
import os
import socket
import time

import numpy as np
import torch
import torch.multiprocessing as mp
from torch.nn import functional as F

import torchrpc.autograd as dist_autograd
import torchrpc.rpc as rpc
from torchrpc.optim import DistributedOptimizer

TEST, BATCH = 297, 32

# --- on the server ---


class Network:
    def __init__(self):
        self.w1 = torch.randn(64, 64).mul_(0.15).requires_grad_()
        self.b1 = torch.zeros(64).requires_grad_()
        self.w2 = torch.randn(10, 64).mul_(0.15).requires_grad_()
        self.b2 = torch.zeros(10).requires_grad_()


shared = None


def network():
    global shared
    shared = shared or Network()
    return shared


def forward(ref, images):
    net = ref.local_value()
    return F.linear(F.relu(F.linear(images, net.w1, net.b1)), net.w2, net.b2)


def parameters(ref):
    net = ref.local_value()
    return [rpc.RRef(each) for each in (net.w1, net.b1, net.w2, net.b2)]


# --- on the trainers ---


def load(path):
    table = np.loadtxt(path, delimiter=",", dtype=np.float32)
    return torch.from_numpy(table[:, :-1] / 16), torch.from_numpy(table[:, -1]).long()


def train(name, trainer, options):
    images, labels = load(options.digits)
    net = rpc.remote("server", network)
    params = rpc.rpc_sync("server", parameters, args=(net,))
    optimizer = DistributedOptimizer(torch.optim.SGD, params, lr=0.1, momentum=0.9, lock_free=True)
    updates, start = 0, time.perf_counter()
    for _ in range(options.epochs):
        for at in range(trainer * BATCH, len(labels) - TEST - BATCH + 1, options.trainers * BATCH):
            with dist_autograd.context() as context:
                logits = rpc.rpc_sync("server", forward, args=(net, images[at : at + BATCH]))
                loss = F.cross_entropy(logits, labels[at : at + BATCH])
                dist_autograd.backward(context, [loss])
                optimizer.step(context)
            updates += 1
    spent = 1000 * (time.perf_counter() - start)
    right = rpc.rpc_sync("server", forward, args=(net, images[-TEST:])).argmax(1).eq(labels[-TEST:])
    print(
        f"{name}: {updates} updates, {spent / updates:.2f} ms per update, loss {loss.item():.3f} at the end; "
        f"accuracy {right.float().mean().item():.1%}"
    )


def run(rank, options):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    name = f"trainer{rank}" if rank else "server"
    rpc.init_rpc(name, rank=rank, world_size=options.trainers + 1)
    if rank:
        train(name, rank - 1, options)
    rpc.shutdown()


def use_free_port():
    """Set the rendezvous address to a free port of this host, unless the environment sets it."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        os.environ.setdefault("MASTER_PORT", str(probe.getsockname()[1]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("digits", help="the file that export_digits.py writes")
    parser.add_argument("--trainers", type=int, default=2, help="(default %(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="(default %(default)s)")
    options = parser.parse_args()
    use_free_port()
    mp.spawn(run, (options,), nprocs=options.trainers + 1)


if __name__ == "__main__":
    main()
