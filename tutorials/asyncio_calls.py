"""Hyperparameter search with coroutines that await calls.

Each trial is a coroutine. It creates a model with its own settings on a worker, lets the worker train it for a few
steps at a time, and awaits the accuracy; the other trials run in the meantime. The search stops a trial whose
accuracy is below the median of the trials that have reached the same step (the median rule of Golovin et al., 2017).
One thread runs all coroutines, without callbacks and locks.

    accuracy = await trial.rpc_async().train(steps)

Written for torch.distributed.rpc; runs unchanged on torchrpc, whose futures can be awaited directly:

    python asyncio_calls.py                  # on torch's own RPC, whose futures `awaitable` wraps
    python -m torchrpc asyncio_calls.py      # on torchrpc

On three machines, with the default `--workers 2` (rank 0 runs the coroutines):

    TORCHRPC_REPLACE=1 torchrun --nnodes 3 --nproc-per-node 1 --node-rank 0, 1 or 2 --master-addr HOST
        --master-port 29500 asyncio_calls.py
"""

import argparse
import asyncio
import os
import random
import socket
import statistics
import time

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm


def load_data(seed):
    """Load images (n, 64) in 0..1 and labels (n,): one part for training, one to compare the trials."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


# --- The workers ---
# A trial is an object on a worker, and the search has an RRef to it. Between calls, the trial keeps the model and its
# optimizer.


class Trial:
    """A model with its own settings that is trained on a worker."""

    def __init__(self, settings, seed):
        torch.manual_seed(seed)
        width = settings["width"]
        self.model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=settings["lr"], momentum=settings["momentum"], nesterov=True
        )
        self.training, self.test = load_data(seed)

    def train(self, steps):
        """Train for `steps` steps; return the accuracy afterwards."""
        images, labels = self.training
        for _ in range(steps):
            batch = torch.randint(len(labels), (64,))
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(images[batch]), labels[batch]).backward()
            self.optimizer.step()
        images, labels = self.test
        with torch.no_grad():
            return (self.model(images).argmax(dim=1) == labels).float().mean().item()


# --- The search ---
# The search runs one coroutine for each trial. While a coroutine awaits its worker, the other coroutines go on, so one
# thread keeps all workers busy. Only this thread uses the accuracies, so the decision to stop a trial needs no lock.


def awaitable(future):
    """Return an awaitable for a future of `rpc_async`. On torchrpc this is the future itself."""
    if hasattr(future, "__await__"):
        return future
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def complete():
        if not waiter.done():  # the waiter has not been cancelled
            try:
                waiter.set_result(future.wait())
            except Exception as error:
                waiter.set_exception(error)

    future.add_done_callback(lambda _: loop.call_soon_threadsafe(complete))
    return waiter


class Search:
    """The accuracies of all trials so far. Only coroutines of one event loop use it, so it needs no lock."""

    def __init__(self, options):
        self.options = options
        self.curves = []  # for each trial: [accuracy after each round]
        self.idle_workers = asyncio.Queue()  # names of workers
        for number in range(options.workers):
            self.idle_workers.put_nowait(f"worker{1 + number}")
        self.longest_delay_s = 0.0  # the longest delay of the event loop that `watch` has seen

    def is_hopeless(self, curve):
        """Return whether the trial is worse than the median of all trials after the same number of rounds."""
        others = [other[len(curve) - 1] for other in self.curves if other is not curve and len(other) >= len(curve)]
        return len(others) >= 3 and curve[-1] < statistics.median(others)

    async def run_trial(self, settings, bar):
        worker = await self.idle_workers.get()
        curve = []
        self.curves.append(curve)
        trial = rpc.remote(worker, Trial, args=(settings, self.options.seed))
        for _ in range(self.options.rounds):
            accuracy = awaitable(trial.rpc_async().train(self.options.steps))
            curve.append(await asyncio.wait_for(accuracy, timeout=60))
            if self.is_hopeless(curve):
                break
        self.idle_workers.put_nowait(worker)
        bar.update()
        bar.set_postfix_str(f"best {max(max(curve) for curve in self.curves if curve):.1%}", refresh=False)
        return settings, curve

    async def watch(self):
        """Measure how long other coroutines block the event loop."""
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.01)
            self.longest_delay_s = max(self.longest_delay_s, time.perf_counter() - start - 0.01)

    async def run(self):
        """Run all trials; return [(settings, curve)]."""
        watching = asyncio.create_task(self.watch())
        with tqdm(total=self.options.trials, unit="trial") as bar:
            all_settings = draw_settings(self.options)
            results = await asyncio.gather(*(self.run_trial(settings, bar) for settings in all_settings))
        watching.cancel()
        return results


def draw_settings(options):
    generator = random.Random(options.seed)
    return [
        {
            "lr": 10 ** generator.uniform(-4, 0.5),
            "momentum": generator.uniform(0.1, 0.95),
            "width": generator.choice([16, 64, 256]),
        }
        for _ in range(options.trials)
    ]


# --- The results ---
# The picture shows the accuracy of each trial; the best trial is highlighted.


def plot(results, best, options):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.style.use("seaborn-v0_8-whitegrid")
    plt.figure(figsize=(8, 4.5))
    for settings, curve in results:
        is_best = curve is best[1]
        label = ", ".join(f"{name} {value:.3g}" for name, value in settings.items()) if is_best else None
        steps = [options.steps * (i + 1) for i in range(len(curve))]
        style = {"color": "C1", "linewidth": 2, "zorder": 3} if is_best else {"color": "C0", "alpha": 0.4}
        plt.plot(steps, [100 * accuracy for accuracy in curve], ".-", label=label, **style)
    plt.xlabel("steps of training")
    plt.ylabel("accuracy, %")
    plt.title(f"{options.trials} trials on {options.workers} workers; the worse are stopped")
    plt.legend()
    plt.tight_layout()
    plt.savefig(options.output, dpi=120)


def report(results, best, search, seconds, options):
    rounds = sum(len(curve) for _, curve in results)
    settings = ", ".join(f"{name} {value:.3g}" for name, value in best[0].items())
    print(
        f"accuracy {max(best[1]):.1%} with {settings}; {options.trials} trials in {seconds:.1f} s, {rounds} rounds of "
        f"{options.trials * options.rounds}; the loop was busy for {1000 * search.longest_delay_s:.0f} ms at most; "
        f"curves in {options.output}"
    )


# --- The processes ---
# Each process joins the group. Rank 0 runs the search. The workers only serve calls, until all processes have called
# `shutdown`.


def run(rank, options):
    torch.set_num_threads(1)  # the processes share the cores
    rpc.init_rpc("search" if rank == 0 else f"worker{rank}", rank=rank, world_size=1 + options.workers)
    if rank == 0:
        start = time.perf_counter()
        search = Search(options)
        results = asyncio.run(search.run())
        best = max(results, key=lambda result: max(result[1]))
        plot(results, best, options)
        report(results, best, search, time.perf_counter() - start, options)
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
    parser.add_argument("--trials", type=int, default=40, help="(default %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of training of a trial (default %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="training steps of a round (default %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="(default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    parser.add_argument("--output", default="asyncio_calls.png", help="the plot (default %(default)s)")
    options = parser.parse_args()
    launch(options, world_size=1 + options.workers)


if __name__ == "__main__":
    main()
