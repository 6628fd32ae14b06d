"""A recurrent network on two processes: embedding and decoder on a parameter server, the LSTM on the trainer.

The network learns to predict the Zen of Python, letter by letter. Every step calls the server twice, for the embedding
and for the decoder, and runs one backward pass through both calls; a DistributedOptimizer updates the parameters of
both processes. At the end the program prints the memory of both processes and how fast it grows.

Written for torch.distributed.*; runs unchanged on torchrpc:

    python rnn.py                             # on torch's own RPC
    python -m torchrpc rnn.py                 # on torchrpc
    python -m torchrpc rnn.py --iterations 10000
    python -m torchrpc rnn.py --profile trace.json     # torchrpc only: a trace of one iteration

The structure follows a published article whose printed code does not run. These points are corrected:

- `parameter_rrefs` and `_remote_method` were used but not defined.
- `from torch.distributed.autograd import context as dist_autograd`, then `dist_autograd.context()`: the module has to
  be imported under that name.
- Batches were `torch.LongTensor(5, 3) % 10`, which is uninitialized memory, with targets of another shape than the
  output. Now the data are a text.
- The hidden state was random for every batch. Now it is kept from batch to batch, detached from the previous graph.
- `.cuda()` in the embedding is removed: everything runs on the CPU.
"""

import argparse
import codecs
import contextlib
import io
import json
import os
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from tqdm import trange

STREAMS = 8  # parts of the text that form a batch


def load_text():
    """Return the text as indices of letters, (length, STREAMS), and the number of different letters."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    text = codecs.decode(this.s, "rot13")
    letters = sorted(set(text))
    numbers = torch.tensor([letters.index(letter) for letter in text])
    length = len(numbers) // STREAMS
    return numbers[: length * STREAMS].view(STREAMS, length).t().contiguous(), len(letters)


def batches(text, steps):
    """Yield (data, target, whether data are the start of the text) endlessly; the target is one letter ahead."""
    while True:
        for start in range(0, len(text) - 1, steps):
            end = min(start + steps, len(text) - 1)
            yield text[start:end], text[start + 1 : end + 1].reshape(-1), start == 0


# --- The model ---
# The embedding and the decoder are modules on the parameter server, and the trainer has RRefs to them. The LSTM is on
# the trainer. The forward pass calls the server twice, and autograd records both calls.


class EmbeddingTable(nn.Module):
    """Created on the parameter server."""

    def __init__(self, ntoken, ninp, dropout):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)

    def forward(self, letters):
        return self.drop(self.encoder(letters))


class Decoder(nn.Module):
    """Created on the parameter server."""

    def __init__(self, ntoken, nhid, dropout):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.decoder = nn.Linear(nhid, ntoken)

    def forward(self, output):
        return self.decoder(self.drop(output))


def call_method(method, rref, *args):
    return method(rref.local_value(), *args)


def remote_method(method, rref, *args):
    """Call a method of the object behind `rref` on its owner, and wait for the result."""
    return rpc.rpc_sync(rref.owner(), call_method, args=(method, rref, *args))


def parameter_rrefs(module):
    """Return RRefs to the parameters of a module of this process."""
    return [rpc.RRef(parameter) for parameter in module.parameters()]


class RNNModel(nn.Module):
    """The model on the trainer. It contains the LSTM; the other layers are on the worker `ps`."""

    def __init__(self, ps, ntoken, ninp, nhid, nlayers, dropout):
        super().__init__()
        self.emb_table_rref = rpc.remote(ps, EmbeddingTable, args=(ntoken, ninp, dropout))
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
        self.decoder_rref = rpc.remote(ps, Decoder, args=(ntoken, nhid, dropout))

    def forward(self, letters, hidden):
        embedded = remote_method(EmbeddingTable.forward, self.emb_table_rref, letters)
        output, hidden = self.rnn(embedded, hidden)
        return remote_method(Decoder.forward, self.decoder_rref, output), hidden

    def parameter_rrefs(self):
        return [
            *rpc.rpc_sync(self.emb_table_rref.owner(), call_method, args=(parameter_rrefs, self.emb_table_rref)),
            *parameter_rrefs(self.rnn),
            *rpc.rpc_sync(self.decoder_rref.owner(), call_method, args=(parameter_rrefs, self.decoder_rref)),
        ]


# --- Training ---
# Each step runs in its own autograd context. The optimizer takes RRefs to all parameters, remote and local, and updates
# them on both processes.


def resident_kib():
    """Return the resident memory of this process in KiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


@contextlib.contextmanager
def profiled(path):
    """Record the `with` block on all workers, as one trace for ui.perfetto.dev."""
    import torchrpc.profiler

    with torchrpc.profiler.profile() as prof:
        yield
    prof.export_chrome_trace(path)


def run_trainer(options, results):
    text, ntoken = load_text()
    model = RNNModel("ps", ntoken, options.size, options.size, options.layers, options.dropout)
    optimizer = DistributedOptimizer(optim.Adam, model.parameter_rrefs(), lr=options.lr)
    criterion = nn.CrossEntropyLoss()
    zeros = torch.zeros(options.layers, STREAMS, options.size)

    losses, memory = [], []  # memory: (iteration, KiB of the trainer, KiB of the server)
    every = max(1, options.iterations // 200)
    hidden = zeros, zeros
    bar = trange(options.iterations)
    for iteration, (data, target, first) in zip(bar, batches(text, options.steps), strict=False):
        hidden = (zeros, zeros) if first else tuple(state.detach() for state in hidden)
        is_profiled = options.profile and iteration == options.iterations - 1  # last, because a profile takes memory
        with (
            profiled(options.profile) if is_profiled else contextlib.nullcontext(),
            dist_autograd.context() as context_id,
        ):
            output, hidden = model(data, hidden)
            loss = criterion(output.view(-1, ntoken), target)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
        if iteration % every == 0 and not is_profiled:
            memory.append((iteration, resident_kib(), rpc.rpc_sync("ps", resident_kib)))
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
    results.write_text(json.dumps([losses, memory]))


def run(rank, options, results):
    torch.set_num_threads(1)  # the processes share the cores
    torch.manual_seed(options.seed)
    rpc.init_rpc("ps" if rank == 0 else "trainer", rank=rank, world_size=2)
    if rank == 1:
        run_trainer(options, results)
    rpc.shutdown()


# --- The results ---
# The memory of a program that runs for days must not grow. The lower picture shows by how much the resident memory of
# both processes has grown since the start.


def mean(values):
    return sum(values) / len(values)


def slope(points):
    """Return the slope of the least-squares line through (x, y) points."""
    x0, y0 = mean([x for x, _ in points]), mean([y for _, y in points])
    spread = sum((x - x0) ** 2 for x, _ in points)
    return sum((x - x0) * (y - y0) for x, y in points) / spread if spread else 0.0


def report_memory(memory, warm_up):
    warm = [point for point in memory if point[0] >= warm_up]
    for column, name in ((1, "trainer"), (2, "parameter server")):
        values = [point[column] for point in warm]
        growth = 1000 * slope([(point[0], point[column]) for point in warm])
        print(
            f"{name}: resident {values[0]} KiB after {warm[0][0]} iterations, {values[-1]} KiB after {warm[-1][0]}; "
            f"slope {growth:+.1f} KiB per 1,000 iterations"
        )


def plot(losses, memory, options):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.style.use("seaborn-v0_8-whitegrid")
    _, (above, below) = plt.subplots(2, 1, figsize=(8, 7))
    above.plot(losses)
    above.set_xlabel("iteration")
    above.set_ylabel("cross entropy per letter")
    above.set_title("embedding and decoder on a parameter server, LSTM on the trainer")
    for column, name in ((1, "trainer"), (2, "parameter server")):
        start = memory[0][column] / 1024
        growth = [point[column] / 1024 - start for point in memory]
        below.plot([point[0] for point in memory], growth, label=f"{name}, {start:.0f} MiB at the start")
    below.set_xlabel("iteration")
    below.set_ylabel("growth of resident memory, MiB")
    low, high = below.get_ylim()
    below.set_ylim(min(low, -1), max(high, 10))  # so that a growth of less than 10 MiB looks small
    below.legend()
    plt.tight_layout()
    plt.savefig(options.output, dpi=120)


def use_free_port():
    """Set the rendezvous address to a free port of this host, unless the environment sets it."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        os.environ.setdefault("MASTER_PORT", str(probe.getsockname()[1]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--iterations", type=int, default=1000, help="(default %(default)s)")
    parser.add_argument("--warm-up", type=int, help="iterations before memory is measured (default: a third of all)")
    parser.add_argument("--steps", type=int, default=20, help="letters in each iteration (default %(default)s)")
    parser.add_argument("--size", type=int, default=64, help="size of embedding and hidden state (default %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="layers of the LSTM (default %(default)s)")
    parser.add_argument("--dropout", type=float, default=0.1, help="(default %(default)s)")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    parser.add_argument(
        "--profile", metavar="FILE", help="write a trace of one iteration on both processes to this file"
    )
    parser.add_argument("--output", default="rnn.png", help="the plot (default %(default)s)")
    options = parser.parse_args()

    # With glibc's cache of small chunks (tcache), the remainders of aligned allocations are not merged again, so the
    # heap grows for a long time without a leak. Without the cache, a growing heap shows a leak of the program.
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")
    use_free_port()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        mp.spawn(run, args=(options, results), nprocs=2)
        losses, memory = json.loads(results.read_text())
    plot(losses, memory, options)
    report_memory(memory, options.iterations // 3 if options.warm_up is None else options.warm_up)
    print(f"loss {mean(losses[:5]):.3f} at the start, {mean(losses[-20:]):.3f} at the end; curves in {options.output}")


if __name__ == "__main__":
    main()
