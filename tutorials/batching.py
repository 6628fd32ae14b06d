"""A server that replies to many callers with one forward pass, and how much this saves.

The server has a network that classifies handwritten digits. Every caller sends one image at a time and waits for the
reply. The tutorial compares three ways to reply:

- one by one: the server runs a forward pass for each call;
- by hand: with `async_execution`, the server collects calls until every caller has sent one, and then replies to all
  of them. If one caller stops, all other callers get no reply;
- batched: the decorator `torchrpc.batched` does the same in one line, and has a time limit for an incomplete batch.

    --absent 1        this many callers stop halfway, which shows which ways stall

Written for torch.distributed.rpc; runs unchanged on torchrpc (`batched` works with both, if torchrpc is installed):

    python batching.py                  # on torch's own RPC
    python -m torchrpc batching.py      # on torchrpc

On three machines, with the default `--processes 2`: the server (rank 0) and two processes of callers:

    TORCHRPC_REPLACE=1 torchrun --nnodes 3 --nproc-per-node 1 --node-rank 0, 1 or 2 --master-addr HOST
        --master-port 29500 batching.py
"""

import argparse
import functools
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm, trange

try:
    from torchrpc import batched
except ImportError:  # without torchrpc there are only two ways
    batched = None

WAYS = ["one by one", "by hand", *(["batched"] if batched else [])]


@functools.cache
def load_data(seed):
    """Load images (n, 64) in 0..1 and labels (n,): one part for training, one for the callers."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


# --- The server ---
# First, the server trains its network. `ask_one_by_one` answers each call by itself. `ask_by_hand` returns a future and
# completes it when the batch is full. `ask_batched` is an ordinary method that takes a batch; the decorator `batched`
# collects the calls.


def train(options):
    """Train a network that is larger than the digits need, so that reading its weights dominates a forward pass."""
    torch.manual_seed(options.seed)
    size = options.size
    layers = nn.Linear(64, size), nn.ReLU(), nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 10)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    (images, labels), _ = load_data(options.seed)
    for _ in trange(options.training, desc="training"):
        batch = torch.randint(len(labels), (128,))
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    return model


class Server:
    """Serves many callers at the same time. A caller passes an `ask_` method one image (64,) and gets its digit."""

    def __init__(self, model, options):
        self.model = model
        self.callers = options.processes * options.callers
        self.passes = 0
        self.lock = threading.Lock()
        self.images, self.answers = [], torch.futures.Future()

    @torch.no_grad()
    def predict(self, images):
        self.passes += 1
        return self.model(images).argmax(dim=1)

    def ask_one_by_one(self, image):
        return self.predict(image[None])[0]

    @rpc.functions.async_execution
    def ask_by_hand(self, image):
        with self.lock:
            index, answers = len(self.images), self.answers
            self.images.append(image)
            full = len(self.images) == self.callers
            if full:
                images, self.images, self.answers = self.images, [], torch.futures.Future()
        answer = answers.then(lambda future: future.wait()[index])
        if full:
            answers.set_result(self.predict(torch.stack(images)))
        return answer

    if batched:

        @batched(max_batch=lambda self: self.callers, timeout=0.02)
        def ask_batched(self, images):
            return self.predict(images)

    def give_up(self):
        """Fail the calls that still wait in `ask_by_hand`."""
        with self.lock:
            answers, self.images, self.answers = self.answers, [], torch.futures.Future()
        answers.set_exception(RuntimeError("the server has given up waiting"))


# --- The callers ---
# Each caller is a thread that sends one image and waits for its answer, again and again.


@dataclass
class Results:
    """The results of one caller, or of all callers."""

    latencies: list  # seconds, one for each answer
    correct: int = 0
    given_up: int = 0  # callers that stopped waiting for an answer


def call(number, server, way, options):
    """Run one caller: send an image, wait for the reply, and send the next image."""
    _, (images, labels) = load_data(options.seed)
    method = "ask_" + way.replace(" ", "_")
    absent = number >= options.processes * options.callers - options.absent
    observed = Results([])
    for i in range(options.calls // 2 if absent else options.calls):
        which = (number + i) % len(labels)
        start = time.perf_counter()
        try:
            answer = getattr(server.rpc_sync(timeout=options.timeout), method)(images[which])
        except RuntimeError:  # timeout
            observed.given_up = 1
            break
        observed.latencies.append(time.perf_counter() - start)
        observed.correct += int(answer == labels[which])
    return observed


def run_callers(rank, server, way, options):
    """Run all callers of one process, each in a thread."""
    numbers = range((rank - 1) * options.callers, rank * options.callers)
    with ThreadPoolExecutor(options.callers) as threads:
        return list(threads.map(lambda number: call(number, server, way, options), numbers))


def measure(server, server_rref, way, options):
    """Return (results of all callers, answers per second, answers per forward pass)."""
    ranks = range(1, 1 + options.processes)
    server.passes = 0
    start = time.perf_counter()
    futures = [rpc.rpc_async(rank, run_callers, args=(rank, server_rref, way, options), timeout=0) for rank in ranks]
    parts = [part for future in futures for part in future.wait()]
    seconds = time.perf_counter() - start
    server.give_up()
    total = Results(
        sorted(latency for part in parts for latency in part.latencies),
        sum(part.correct for part in parts),
        sum(part.given_up for part in parts),
    )
    answers = len(total.latencies)
    return total, answers / seconds, answers / max(1, server.passes)


# --- The results ---
# The bars compare the rates; the curves show how the latencies are distributed.


def report(results, options):
    for way, (observed, rate, together) in results.items():
        latencies = [1000 * latency for latency in observed.latencies]
        median, slowest = latencies[len(latencies) // 2], latencies[len(latencies) * 99 // 100]
        print(
            f"{way}: {rate:.0f} answers/s, {together:.1f} in a forward pass; latency {median:.1f} ms in the middle, "
            f"{slowest:.1f} ms at 99 %; accuracy {observed.correct / len(latencies):.1%}; "
            f"{observed.given_up} callers gave up"
        )
    print(f"picture in {options.output}")


def plot(results, options):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.style.use("seaborn-v0_8-whitegrid")
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 4.5))
    for way, (observed, rate, together) in results.items():
        bar = left.bar(way, rate)
        left.text(way, rate, f"{together:.1f} in a pass", ha="center", va="bottom")
        shares = [100 * (i + 1) / len(observed.latencies) for i in range(len(observed.latencies))]
        right.plot([1000 * latency for latency in observed.latencies], shares, color=bar[0].get_facecolor(), label=way)
    left.set_ylabel("answers a second")
    left.margins(y=0.1)
    right.set_xlabel("latency, ms")
    right.set_ylabel("answers that came by then, %")
    right.set_xscale("log")
    right.legend()
    left.set_title(f"{options.processes * options.callers} callers, {options.absent} of them stop halfway")
    plt.tight_layout()
    plt.savefig(options.output, dpi=120)


# --- The processes ---
# Each process joins the group. Rank 0 is the server; it also runs the measurement.


def run(rank, options):
    torch.set_num_threads(1)  # the processes share the cores
    name = "server" if rank == 0 else f"callers{rank}"
    load_data(options.seed)
    threads = rpc.TensorPipeRpcBackendOptions(num_worker_threads=max(16, options.processes * options.callers))
    rpc.init_rpc(name, rank=rank, world_size=1 + options.processes, rpc_backend_options=threads)
    if rank == 0:
        server = Server(train(options), options)
        rref = rpc.RRef(server)
        results = {way: measure(server, rref, way, options) for way in tqdm(WAYS, desc="ways")}
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
    parser.add_argument("--processes", type=int, default=2, help="processes that contain callers (default %(default)s)")
    parser.add_argument("--callers", type=int, default=8, help="calling threads of each process (default %(default)s)")
    parser.add_argument("--calls", type=int, default=200, help="calls of each caller (default %(default)s)")
    parser.add_argument("--absent", type=int, default=0, help="callers that stop halfway (default %(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=5, help="seconds that a caller waits for a reply (default %(default)s)"
    )
    parser.add_argument("--size", type=int, default=2048, help="size of the network's layers (default %(default)s)")
    parser.add_argument(
        "--training", type=int, default=60, help="training steps before the measurement (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    parser.add_argument("--output", default="batching.png", help="the plot (default %(default)s)")
    options = parser.parse_args()
    launch(options, world_size=1 + options.processes)


if __name__ == "__main__":
    main()
