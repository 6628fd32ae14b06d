"""A parameter server that workers push gradients to, asynchronously, through RPC.

The server holds the model and the optimizer. Every worker fetches the weights, computes gradients on its own share of
the data (scikit-learn's handwritten digits) and pushes them with rpc_async. The server applies gradients when they
arrive, without waiting for the other workers.

Written for torch.distributed.rpc; runs unchanged on torchrpc:

    python parameter_server_push.py                   # on torch's own RPC
    python -m torchrpc parameter_server_push.py       # on torchrpc

The structure follows a published article whose printed code does not run. These points are corrected:

- `init_rpc(..., rpc_backend=...)`: the argument is called `backend`, and TensorPipe is the default.
- `rpc_sync("ps", lambda: global_ps_rref)`: torch cannot pickle a lambda, and `global_ps_rref` was a local variable
  of another function. Now a module-level function returns the server, which is created before the group forms.
- `ps_rref.local_value().apply_gradients`: only the owner has the local value. A user calls through the reference:
  `ps_rref.rpc_async().apply_gradients(...)`.
- `get_parameter_rrefs` had the decorator `async_execution`, which is for functions that return a Future, and created an
  RRef for each parameter. Workers now fetch the weights in one call.
- Workers computed gradients with their own random weights. They now load the server's weights before every step.
- Calls of several workers run at the same time on the server's threads. A lock serializes the steps.
- `time.sleep` was used to wait for the server, and there was one worker. init_rpc itself waits for all workers, and
  mp.spawn starts any number of them.
"""

import argparse
import json
import os
import socket
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

# --- The server ---
# The server holds the model. Calls of several workers run at the same time on its threads, so a lock guards the step.
# The process creates the server object before the group forms, so that it exists when the first call arrives.


def make_model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def load_data(seed):
    """Load images (n, 64) in 0..1 and labels (n,): one part for training, one for the final test."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


class ParameterServer:
    """The model, the optimizer and the losses so far, on the worker "ps". Thread-safe."""

    def __init__(self, options, updates):
        torch.manual_seed(options.seed)
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=options.lr, momentum=0.9)
        self.lock = threading.Lock()
        self.losses = []
        self.bar = tqdm(total=updates, unit="update")

    def get_parameters(self):
        with self.lock:
            # Copies: the reply is serialised after the lock is released.
            return {name: value.clone() for name, value in self.model.state_dict().items()}

    def apply_gradients(self, gradients, loss):
        """Apply a step with a worker's gradients, {parameter name: tensor}; `loss` is that of the worker's batch."""
        with self.lock:
            for name, parameter in self.model.named_parameters():
                parameter.grad = gradients[name]
            self.optimizer.step()
            self.losses.append(loss)
            self.bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            self.bar.update()
        return True

    def accuracy(self, images, labels):
        with torch.no_grad():
            return (self.model(images).argmax(dim=1) == labels).float().mean().item()


# The server; set only in the server's process.
parameter_server = None


def get_parameter_server():
    return parameter_server


def run_parameter_server(options, results):
    global parameter_server
    parameter_server = ParameterServer(options, updates=options.workers * options.epochs * steps_per_epoch(options))
    rpc.init_rpc("ps", rank=0, world_size=1 + options.workers)
    rpc.shutdown()  # serves calls until every worker has finished
    parameter_server.bar.close()
    _, test_data = load_data(options.seed)
    results.write_text(json.dumps([parameter_server.losses, parameter_server.accuracy(*test_data)]))


# --- The workers ---
# A worker loads the server's weights, computes gradients on its own share of the data, and pushes them with
# `rpc_async`. It waits only for its own previous push, and selects its next batch while the server applies
# that push.


def steps_per_epoch(options):
    return 1500 // options.workers // options.batch


def run_worker(rank, options):
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=1 + options.workers)
    ps_rref = rpc.remote("ps", get_parameter_server)
    model = make_model()
    (images, labels), _ = load_data(options.seed)
    images, labels = images[rank - 1 :: options.workers], labels[rank - 1 :: options.workers]
    generator = torch.Generator().manual_seed(1000 * options.seed + rank)

    pushed = None
    for _ in range(options.epochs):
        order = torch.randperm(len(labels), generator=generator)
        for step in range(steps_per_epoch(options)):
            batch = order[step * options.batch : (step + 1) * options.batch]
            if pushed is not None:
                pushed.wait()  # until the server has applied the gradients of the last step
            model.load_state_dict(ps_rref.rpc_sync().get_parameters())
            model.zero_grad()
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            pushed = ps_rref.rpc_async().apply_gradients(gradients, loss.item())
    pushed.wait()
    rpc.shutdown()


def run(rank, options, results):
    torch.set_num_threads(1)  # the processes share the cores
    if rank == 0:
        run_parameter_server(options, results)
    else:
        run_worker(rank, options)


# --- The results ---
# The losses are in the order in which the server applied the gradients.


def mean(values):
    return sum(values) / len(values)


def plot(losses, accuracy, options):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.style.use("seaborn-v0_8-whitegrid")
    smooth = [mean(losses[max(0, i - 10) : i + 10]) for i in range(len(losses))]
    plt.figure(figsize=(8, 4.5))
    plt.plot(losses, alpha=0.3, label="one worker's batch")
    plt.plot(smooth, linewidth=2, label="mean of the 20 updates around it")
    plt.xlabel("update on the server")
    plt.ylabel("cross entropy")
    plt.title(f"{options.workers} workers push gradients; test accuracy {accuracy:.1%}")
    plt.legend()
    plt.tight_layout()
    plt.savefig(options.output, dpi=120)


# --- The processes ---
# One command starts all processes.


def use_free_port():
    """Set the rendezvous address to a free port of this host, unless the environment sets it."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        os.environ.setdefault("MASTER_PORT", str(probe.getsockname()[1]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=3, help="processes that compute gradients (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=15, help="(default %(default)s)")
    parser.add_argument("--batch", type=int, default=25, help="images in each gradient (default %(default)s)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    parser.add_argument("--output", default="parameter_server_push.png", help="the plot (default %(default)s)")
    options = parser.parse_args()

    use_free_port()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        mp.spawn(run, args=(options, results), nprocs=1 + options.workers)
        losses, accuracy = json.loads(results.read_text())
    plot(losses, accuracy, options)
    print(
        f"loss {mean(losses[:10]):.3f} at the start, {mean(losses[-10:]):.3f} at the end of {len(losses)} updates; "
        f"test accuracy {accuracy:.1%}; curve in {options.output}"
    )


if __name__ == "__main__":
    main()
