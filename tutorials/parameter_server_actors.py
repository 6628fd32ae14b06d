"""A driver that trains a network with remote objects: parameter servers and workers, as in Ray's tutorial.

The driver creates a `ParameterServer` and several `DataWorker`s in other processes and has RRefs to them. Workers
compute gradients with the weights that they receive; the server applies gradients and returns new weights. Two ways to
train:

- synchronously: the server averages the gradients of all workers, then all workers get the new weights;
- asynchronously: the server applies each gradient when it arrives, and its worker continues with the new weights.

Each of these options turns on a variant:

    --servers 2                   the parameters are sharded over several servers
    --optimizer Adam              another update rule
    --wait-for 1 --slow 0.05      an update waits for one worker only (backup workers, Chen et al. 2016); one is slow

Written for torch.distributed.rpc; runs unchanged on torchrpc, and on Ray if it is installed:

    python parameter_server_actors.py --results torch.json           # on torch's own RPC
    python -m torchrpc parameter_server_actors.py --compare torch.json --ray     # all three in one picture

On two machines, with 1 driver, 1 server and 2 workers, run this command on both (rank 0 is the driver):

    TORCHRPC_REPLACE=1 torchrun --nnodes 2 --nproc-per-node 2 --node-rank 0 or 1 --master-addr HOST --master-port 29500
        parameter_server_actors.py

Differences from Ray's tutorial: gradients are averaged, not summed, so that the step does not grow with the number of
workers. Weights and gradients are vectors, split into equal shards, and pass through the driver.
"""

import argparse
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from tqdm import tqdm

# --- The data ---
# Images of handwritten digits, 28 by 28 pixels.


def load_data(options):
    """Load images (n, 1, 28, 28) of mean 0 and variance 1, and labels (n,): one part for training, one for the test."""
    try:
        images, labels = load_mnist(options.data)
    except (ImportError, RuntimeError, OSError):  # no torchvision, no network
        images, labels = load_digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(options.seed))
    images, labels = ((images - images.mean()) / images.std())[order], labels[order]
    return (images[:-297], labels[:-297]), (images[-297:], labels[-297:])


def load_mnist(folder):
    from torchvision import datasets

    data = datasets.MNIST(folder, download=True)
    return data.data[:, None].float(), data.targets


def load_digits():
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None]
    return F.interpolate(images, size=28, mode="bilinear"), torch.tensor(digits.target)


# --- The remote objects ---
# The remote objects are instances of two ordinary classes. The driver creates them on other workers with `rpc.remote`
# and calls their methods through RRefs.


class ConvNet(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.conv1 = nn.Conv2d(1, 3, kernel_size=3)
        self.fc = nn.Linear(192, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 3))
        return F.log_softmax(self.fc(x.view(-1, 192)), dim=1)

    def get_weights(self):
        return parameters_to_vector(self.parameters()).detach()

    def set_weights(self, weights):
        vector_to_parameters(weights, self.parameters())


class ParameterServer:
    """Has one shard of the weights. The driver makes one call to it at a time."""

    def __init__(self, shard, options):
        self.weights = ConvNet(options.seed).get_weights().tensor_split(options.servers)[shard].clone()
        self.optimizer = getattr(optim, options.optimizer)([self.weights], lr=options.lr)

    def get_weights(self):
        return self.weights.clone()  # the reply may be sent after the next step has started

    def apply_gradients(self, *gradients):
        self.weights.grad = torch.stack(gradients).mean(dim=0)
        self.optimizer.step()
        return self.get_weights()


class DataWorker:
    """Has a share of the data. The driver makes one call to it at a time."""

    def __init__(self, number, options):
        self.model = ConvNet(options.seed)
        (images, labels), _ = load_data(options)
        self.images, self.labels = images[number :: options.workers], labels[number :: options.workers]
        self.batch = options.batch
        self.delay = options.slow if number == options.workers - 1 else 0.0
        self.generator = torch.Generator().manual_seed(1000 * options.seed + number)
        self.batches = iter(())

    def next_batch(self):
        """Return the next batch. When all data have been used, shuffle them again."""
        indices = next(self.batches, None)
        if indices is None:
            self.batches = iter(torch.randperm(len(self.labels), generator=self.generator).split(self.batch))
            indices = next(self.batches)
        return self.images[indices], self.labels[indices]

    def compute_gradients(self, *shards):
        self.model.set_weights(torch.cat(shards))
        images, labels = self.next_batch()
        self.model.zero_grad()
        F.nll_loss(self.model(images), labels).backward()
        time.sleep(self.delay)
        return parameters_to_vector(parameter.grad for parameter in self.model.parameters())


# --- The systems ---
# RPC and Ray differ in how to create a remote object, how to call it, and how to wait for some of many results. A class
# for each system hides these differences.


def wait_in_python(futures, num_returns=1):
    """Do the same as torchrpc.wait, for torch's own RPC; return (ready, rest)."""
    done = threading.Semaphore(0)
    for future in futures:
        future.add_done_callback(lambda _: done.release())
    for _ in range(num_returns):
        done.acquire()
    ready = [future for future in futures if future.done()][:num_returns]
    return ready, [future for future in futures if future not in ready]


class Rpc:
    """Creates objects on workers of the group, and calls them through RRefs."""

    name = rpc.__name__.partition(".")[0]  # torch or torchrpc
    wait = staticmethod(getattr(rpc, "wait", wait_in_python))

    def create(self, worker, kind, *args):
        return rpc.remote(worker, kind, args=args)

    def call(self, actor, method, *args):
        return getattr(actor.rpc_async(), method)(*args)

    def get(self, futures):
        return torch.futures.wait_all(futures)


class Ray:
    """Creates Ray actors on this machine, and calls them."""

    name = "Ray"

    def __init__(self):
        import ray

        self.ray = ray
        ray.cloudpickle.register_pickle_by_value(
            sys.modules[__name__]
        )  # other processes cannot import this file as a module
        environment = {"env_vars": {"OMP_NUM_THREADS": "1"}}  # one thread in each process, as with RPC
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR", runtime_env=environment)
        self.get, self.wait = ray.get, ray.wait

    def create(self, worker, kind, *args):
        return self.ray.remote(kind).options(num_cpus=0).remote(*args)

    def call(self, actor, method, *args):
        return getattr(actor, method).remote(*args)


# --- The driver ---
# The driver has only references. Synchronous training waits for all workers in each step, or for `--wait-for` of them.
# Asynchronous training applies each gradient when it arrives, and its worker continues with the new weights.


class Driver:
    """Trains with servers and workers of `system`, and records the accuracy."""

    def __init__(self, system, options):
        self.system, self.options = system, options
        self.servers = [
            system.create(f"server{shard}", ParameterServer, shard, options) for shard in range(options.servers)
        ]
        self.workers = [
            system.create(f"worker{number}", DataWorker, number, options) for number in range(options.workers)
        ]
        self.model = ConvNet(options.seed)
        _, self.test = load_data(options)
        self.shards = system.get([system.call(server, "get_weights") for server in self.servers])
        system.get(
            [self.start(worker) for worker in self.workers]
        )  # afterwards all workers have their data and have run once

    def start(self, worker):
        """Start the computation of gradients with the current weights; return their future."""
        return self.system.call(worker, "compute_gradients", *self.shards)

    def update(self, *gradients):
        """Update the weights by one step with the mean of the gradients."""
        parts = zip(*(gradient.tensor_split(self.options.servers) for gradient in gradients), strict=True)
        self.shards = self.system.get(
            [
                self.system.call(server, "apply_gradients", *(part.clone() for part in shard))
                for server, shard in zip(self.servers, parts, strict=True)
            ]
        )

    def train_synchronously(self):
        """Make each update with the gradients of `wait_for` workers; drop gradients started for an earlier update."""
        computing = {}  # future -> (number of the worker, update that it is for)
        idle = set(range(len(self.workers)))
        for i in range(self.options.iterations):
            computing.update({self.start(self.workers[number]): (number, i) for number in sorted(idle)})
            fresh = {}
            while len(fresh) < self.options.wait_for:
                (done,), _ = self.system.wait(list(computing))
                number, started = computing.pop(done)
                if started == i:
                    fresh[number] = done
                else:
                    computing[self.start(self.workers[number])] = number, i
            self.update(*self.system.get([fresh[number] for number in sorted(fresh)]))
            idle = set(fresh)
            yield self.options.wait_for
        self.system.get(list(computing))

    def train_asynchronously(self):
        """Make each update with one gradient; use as many gradients as synchronous training with all workers."""
        computing = {self.start(worker): worker for worker in self.workers}
        for _ in range(self.options.iterations * self.options.workers):
            (done,), _ = self.system.wait(list(computing))
            worker = computing.pop(done)
            self.update(*self.system.get([done]))
            computing[self.start(worker)] = worker  # at the end of the dict, so that no worker is skipped
            yield 1
        self.system.get(list(computing))

    def accuracy(self):
        images, labels = self.test
        self.model.set_weights(torch.cat(self.shards))
        with torch.no_grad():
            return (self.model(images).argmax(dim=1) == labels).float().mean().item()

    def run(self, mode):
        """Train; return [(seconds, updates, gradients, accuracy)] at the start and after every ten updates."""
        updates = self.options.iterations * (self.options.workers if mode == "asynchronous" else 1)
        training = self.train_asynchronously() if mode == "asynchronous" else self.train_synchronously()
        record, seconds, gradients = [(0.0, 0, 0, self.accuracy())], 0.0, 0
        start = time.perf_counter()
        for i, used in enumerate(tqdm(training, total=updates, desc=f"{self.system.name}, {mode}"), start=1):
            gradients += used
            if i % 10 == 0 or i == updates:
                seconds += time.perf_counter() - start  # excludes the time to measure the accuracy
                record.append((seconds, i, gradients, self.accuracy()))
                start = time.perf_counter()
        return record


MODES = ["synchronous", "asynchronous"]


def train_on(system, options):
    """Train in both modes; return {"system, mode": record}."""
    return {f"{system.name}, {mode}": Driver(system, options).run(mode) for mode in MODES}


# --- The results ---
# The left picture shows the accuracy over time, the right one the rate of updates.


def rate(record):
    seconds, updates, *_ = record[-1]
    return updates / seconds


def plot(records, options):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.style.use("seaborn-v0_8-whitegrid")
    _, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), width_ratios=(3, 2))
    for label, record in records.items():
        color = f"C{list(records).index(label) // len(MODES)}"
        style = "--" if label.endswith(", asynchronous") else "-"
        left.plot([row[0] for row in record], [100 * row[3] for row in record], style, color=color, label=label)
        right.barh(label, rate(record), color=color, fill=style == "-", edgecolor=color)
        right.text(rate(record), label, f" {rate(record):.0f}", va="center")
    left.set_xlabel("seconds")
    left.set_ylabel("test accuracy, %")
    left.legend()
    right.set_xlabel("updates a second")
    right.margins(x=0.15)
    right.invert_yaxis()
    left.set_title(f"{options.workers} workers, {options.servers} server(s), {options.optimizer}")
    plt.tight_layout()
    plt.savefig(options.output, dpi=120)


def report(records, options):
    for label, record in records.items():
        seconds, updates, gradients, accuracy = record[-1]
        print(
            f"{label}: {updates} updates by {gradients} gradients in {seconds:.2f} s, {rate(record):.0f} updates/s; "
            f"accuracy {accuracy:.1%}"
        )
    print(f"curves in {options.output}")


# --- The processes ---
# Each process joins the group. All processes except the driver only serve calls.


def run(rank, options):
    torch.set_num_threads(1)  # the processes share the cores
    names = [
        "driver",
        *(f"server{shard}" for shard in range(options.servers)),
        *(f"worker{number}" for number in range(options.workers)),
    ]
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names))
    records = train_on(Rpc(), options) if rank == 0 else {}
    rpc.shutdown()  # servers and workers serve calls until this returns
    if rank == 0:
        if options.ray:
            records |= train_on(Ray(), options)
        if options.results:
            Path(options.results).write_text(json.dumps(records))
        for path in options.compare:
            records |= json.loads(Path(path).read_text())
        plot(records, options)
        report(records, options)


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
    parser.add_argument("--iterations", type=int, default=200, help="synchronous updates (default %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="workers that compute gradients (default %(default)s)")
    parser.add_argument(
        "--servers", type=int, default=1, help="servers that share the parameters (default %(default)s)"
    )
    parser.add_argument(
        "--optimizer", default="SGD", choices=["SGD", "Adam", "Adagrad", "RMSprop"], help="(default %(default)s)"
    )
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate (default %(default)s)")
    parser.add_argument("--batch", type=int, default=128, help="images in each gradient (default %(default)s)")
    parser.add_argument("--wait-for", type=int, help="gradients in a synchronous update (default: one of each worker)")
    parser.add_argument("--slow", type=float, default=0.0, help="delay of the last worker in seconds (default 0)")
    parser.add_argument("--data", default="data", help="folder for MNIST (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    parser.add_argument("--ray", action="store_true", help="afterwards, run the same on Ray")
    parser.add_argument("--results", help="write the curves to this file, as JSON")
    parser.add_argument("--compare", nargs="*", default=[], help="files written by --results: draw their curves, too")
    parser.add_argument("--output", default="parameter_server_actors.png", help="the plot (default %(default)s)")
    options = parser.parse_args()
    options.wait_for = options.wait_for or options.workers
    if not 1 <= options.wait_for <= options.workers:
        parser.error(f"--wait-for must be from 1 to the number of workers, {options.workers}")
    launch(options, world_size=1 + options.servers + options.workers)


if __name__ == "__main__":
    main()
