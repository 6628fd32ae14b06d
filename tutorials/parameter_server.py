"""Trainers that share a model on a parameter server, through distributed autograd and DistributedOptimizer.

The server holds a convolutional network. A trainer calls the server to run the network, computes the loss itself, and
starts a backward pass that continues through the call on the server. The gradients stay on the server, in the autograd
context of this pass, and a DistributedOptimizer applies them there. The data are MNIST if torchvision is installed,
otherwise scikit-learn's handwritten digits, scaled up to the same size.

Written for torch.distributed.*; runs unchanged on torchrpc:

    python parameter_server.py --losses torch.json             # on torch's own RPC
    python -m torchrpc parameter_server.py --compare torch.json  # on torchrpc; both curves in one picture
    python -m torchrpc parameter_server.py --trainers 2
    python -m torchrpc parameter_server.py --device cuda         # the model and the data on a GPU

If a launcher starts the processes (torchrun, srun, mpirun, Ray, Kubernetes), rank 0 is the server and the other ranks
are trainers. Any process may be killed and started again. The server hands out the steps, so a restarted trainer takes
the next step. If the server is killed, the trainers wait for the restarted server, which goes on from its checkpoint:

    TORCHRPC_REPLACE=1 torchrun --nproc-per-node 3 --max-restarts 3 parameter_server.py --checkpoint /shared/server.pt

The structure follows the parameter server tutorial on pytorch.org. These points are corrected:

- All processes are started by one command.
- With two trainers torch's optimizer fails with "one of the variables needed for gradient computation has been
  modified by an inplace operation", because one trainer's step changes the parameters between the other's forward and
  backward pass. On torchrpc the optimizer is lock-free; see `make_optimizer`.
- The accuracy was computed with dropout enabled, because `eval()` was applied to the trainer's object, which has no
  layers. Now the server measures it when all trainers have finished.
- Every step fetched all gradients to check that the server has some. Now only the first step of each epoch does.
- The dropout between the linear layers is `Dropout`, not `Dropout2d`.
"""

import argparse
import contextlib
import inspect
import json
import os
import socket
import threading
import time
from pathlib import Path

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional as F
from tqdm import tqdm

LOST = getattr(rpc, "WorkerLostError", ())  # torch's own RPC has no such exception: an empty tuple catches nothing

# --- The data ---
# Images of handwritten digits, 28 by 28 pixels. The number of a step determines which images are in its batch.


def load_data(options):
    """Load images (n, 1, 28, 28) of mean 0 and variance 1, and labels (n,): one part for training, one for the test."""
    try:
        images, labels = load_mnist(options.data)
    except (ImportError, RuntimeError, OSError):  # no torchvision, no network
        images, labels = load_digits()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(options.seed))
    images, labels = ((images - images.mean()) / images.std())[order], labels[order]
    training, test = slice(options.images), slice(-297, None)
    return (images[:-297][training], labels[:-297][training]), (images[test], labels[test])


def load_mnist(folder):
    from torchvision import datasets

    data = datasets.MNIST(folder, download=True)
    return data.data[:, None].float(), data.targets


def load_digits():
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None]
    return F.interpolate(images, size=28, mode="bilinear"), torch.tensor(digits.target)


def steps_per_epoch(labels, options):
    return -(-len(labels) // options.batch)


def batch_of(step, images, labels, options):
    epoch, position = divmod(step, steps_per_epoch(labels, options))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1000 * options.seed + epoch))
    part = order[position * options.batch :][: options.batch]
    return images[part].to(options.device), labels[part].to(options.device)


# --- The server ---
# The model is on the server only. Trainers call `forward` through an RRef; the server keeps the graph of each call in
# the autograd context of the trainer's pass. The server also hands out the steps. With `--checkpoint`, it saves the
# model every 25 steps, and a restarted server goes on from the checkpoint.


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout2d(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(self.conv2(x), 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


class ParameterServer(nn.Module):
    """Lives on the worker "parameter_server"; trainers call its methods. Several calls may run at the same time."""

    def __init__(self, options):
        super().__init__()
        self.options = options
        torch.manual_seed(options.seed)
        self.model = Net().to(options.device)
        (_, labels), self.test = load_data(options)
        self.steps = options.epochs * steps_per_epoch(labels, options)
        self.lock = threading.Lock()  # guards `step` and `losses`
        self.step = 0  # the number of the next step
        self.losses = {}  # {trainer: the losses of its steps}
        self.finished = threading.Event()
        if state := load_checkpoint(options):
            self.model.load_state_dict(state["model"])
            self.step, self.losses = state["step"], state["losses"]
            print(f"the server goes on at step {self.step}", flush=True)
        self.bar = tqdm(total=self.steps, initial=self.step)

    def forward(self, images):
        return self.model(images)

    def get_dist_gradients(self, context_id):
        """Return the gradients of one trainer's pass, {parameter: gradient}. Each pass has its own context."""
        return dist_autograd.get_gradients(context_id)

    def get_param_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.model.parameters()]

    def next_step(self, trainer, loss):
        """Return the number of the trainer's next step, or None after the last; `loss` is that of its previous step."""
        with self.lock:
            if loss is not None:
                self.losses.setdefault(trainer, []).append(loss)
                self.bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
                self.bar.update()
            if self.step % 25 == 0 or self.step == self.steps:
                self.save()
            if self.step == self.steps:
                self.finished.set()
                return None
            self.step += 1
            return self.step - 1

    def save(self):
        if self.options.checkpoint:
            state = {"model": self.model.state_dict(), "step": self.step, "losses": self.losses}
            torch.save(state, f"{self.options.checkpoint}.new")
            os.replace(f"{self.options.checkpoint}.new", self.options.checkpoint)  # never an incomplete file

    def accuracy(self):
        images, labels = self.test
        with torch.no_grad():
            found = self.model.eval()(images.to(self.options.device)).argmax(dim=1)
        return (found.cpu() == labels).float().mean().item()


def load_checkpoint(options):
    with contextlib.suppress(FileNotFoundError):
        return torch.load(options.checkpoint) if options.checkpoint else None


# The only instance, in the server's process.
parameter_server = None


def get_parameter_server():
    return parameter_server


def run_parameter_server(options):
    global parameter_server
    parameter_server = server = ParameterServer(options)
    rpc.init_rpc("parameter_server", rank=0, world_size=1 + options.trainers)
    steps_before = -1
    while not server.finished.wait(options.patience):  # meanwhile the server serves the trainers' calls
        if server.step == steps_before:
            raise RuntimeError(f"no trainer has asked for a step for {options.patience:g} seconds")
        steps_before = server.step
    leave()  # serves calls until the trainers have finished
    server.bar.close()
    report(server.losses, server.accuracy(), options)


def leave():
    try:
        rpc.shutdown()
    except LOST as error:  # a killed trainer was not started again: the other trainers have done its steps
        print(f"{error.worker} was lost", flush=True)


# --- The trainers ---
# `TrainerNet` looks like a local module, but its forward pass is a remote call. The trainer computes the loss, and
# `dist_autograd.backward` continues through the call on the server. The optimizer updates the parameters there. If the
# server is lost, all references to its objects are lost, too: the trainer waits for the restarted server and makes new
# references.


def call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def remote_method(method, rref, *args, **kwargs):
    """Call a method of the object behind `rref` on its owner, and wait for the result."""
    return rpc.rpc_sync(rref.owner(), call_method, args=(method, rref, *args), kwargs=kwargs)


class TrainerNet(nn.Module):
    """Represents the server's network on a trainer; has an RRef to the `ParameterServer`."""

    def __init__(self):
        super().__init__()
        self.param_server_rref = rpc.remote("parameter_server", get_parameter_server)

    def next_step(self, trainer, loss):
        return remote_method(ParameterServer.next_step, self.param_server_rref, trainer, loss)

    def get_global_param_rrefs(self):
        return remote_method(ParameterServer.get_param_rrefs, self.param_server_rref)

    def forward(self, images):
        return remote_method(ParameterServer.forward, self.param_server_rref, images)


def make_optimizer(param_rrefs, options):
    """Return SGD on the server; lock-free if there are several trainers and the optimizer supports it.

    By default a step marks the parameters as modified. If another trainer has run its forward pass before the step, its
    backward pass then fails, because its gradients would mix old activations with new parameters. Lock-free steps do
    not mark the parameters and do not wait for each other. So some gradients mix old activations with new parameters,
    and if two steps run at the same time, some elements may get only one of them. With few trainers and small steps the
    training still converges (Hogwild!, Niu et al., 2011).
    """
    can_be_lock_free = "lock_free" in inspect.signature(DistributedOptimizer.__init__).parameters
    settings = {"lock_free": True} if can_be_lock_free and options.trainers > 1 else {}
    return DistributedOptimizer(optim.SGD, param_rrefs, lr=options.lr, **settings)


def connect(options):
    """Wait until the server can be called; return the network and its optimizer."""
    deadline = time.monotonic() + options.patience
    while True:
        try:
            net = TrainerNet()
            return net, make_optimizer(net.get_global_param_rrefs(), options)
        except LOST:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def train(step, net, optimizer, data, options):
    """Run one step; return the loss."""
    images, labels = batch_of(step, *data, options)
    with dist_autograd.context() as context_id:
        loss = F.nll_loss(net(images), labels)
        dist_autograd.backward(context_id, [loss])
        if step % steps_per_epoch(data[1], options) == 0:
            assert remote_method(ParameterServer.get_dist_gradients, net.param_server_rref, context_id) != {}
        optimizer.step(context_id)
    return loss.item()


def run_trainer(rank, options):
    settings = rpc.TensorPipeRpcBackendOptions()
    if options.device != "cpu":  # images there, predictions and gradients back
        settings.set_device_map("parameter_server", {f"{options.device}:0": f"{options.device}:0"})
    name = f"trainer_{rank}"
    rpc.init_rpc(name, rank=rank, world_size=1 + options.trainers, rpc_backend_options=settings)
    data, _ = load_data(options)
    net, optimizer = connect(options)
    loss = None
    while True:
        try:
            step = net.next_step(name, loss)
            if step is None:
                break
            loss = train(step, net, optimizer, data, options)
        except LOST as error:
            print(f"{name} waits for {error.worker} to be started again", flush=True)
            net, optimizer = connect(options)
            loss = None
    leave()


def run(rank, options):
    torch.set_num_threads(1)  # the processes share the cores
    if rank == 0:
        run_parameter_server(options)
    else:
        run_trainer(rank, options)


# --- The results ---
# Pale curves are the losses; bold curves are means over 10 neighbouring steps.


def mean(values):
    return sum(values) / len(values)


def smooth(losses):
    return [mean(losses[max(0, i - 5) : i + 5]) for i in range(len(losses))]


def plot(curves, accuracy, options):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.style.use("seaborn-v0_8-whitegrid")
    plt.figure(figsize=(8, 4.5))
    for label, losses in curves.items():
        line = plt.plot(losses, alpha=0.25)[0]
        style = "--" if label == options.compare else "-"
        plt.plot(smooth(losses), style, linewidth=2, color=line.get_color(), label=f"{label}, mean of 10 steps")
    plt.xlabel("step of a trainer")
    plt.ylabel("negative log-likelihood")
    plt.title(f"one model on a parameter server, {options.trainers} trainer(s); test accuracy {accuracy:.1%}")
    plt.legend()
    plt.tight_layout()
    plt.savefig(options.output, dpi=120)


def report(curves, accuracy, options):
    """Save and draw the losses, {trainer: losses}. Runs on the server."""
    if options.losses:
        Path(options.losses).write_text(json.dumps(curves))
    start = next(iter(curves.values()))[0]  # of the first step: other trainers may start later, with a better model
    end = mean([mean(losses[-10:]) for losses in curves.values()])
    if options.compare:
        other = next(iter(json.loads(Path(options.compare).read_text()).values()))
        distance = max(abs(a - b) for a, b in zip(curves["trainer_1"], other, strict=True))
        print(f"largest difference to {options.compare}: {distance:.2e}")
        curves = {**curves, options.compare: other}
    plot(curves, accuracy, options)
    print(
        f"loss {start:.3f} at the start, {end:.3f} at the end; accuracy {accuracy:.1%}; curve in {options.output}",
        flush=True,
    )


# --- The processes ---
# This command starts all processes, or a launcher does.


def find_launch():
    """Return the rank and world size that a launcher gave this process; None without one, or without torchrpc."""
    with contextlib.suppress(ImportError):
        from torchrpc import launch

        return launch.find_launch()


def use_free_port():
    """Set the rendezvous address to a free port of this host, unless the environment sets it."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        os.environ.setdefault("MASTER_PORT", str(probe.getsockname()[1]))


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trainers", type=int, default=1, help="(default %(default)s)")
    parser.add_argument("--device", default="cpu", help="of the model and the data, for example cuda (default cpu)")
    parser.add_argument("--epochs", type=int, default=5, help="(default %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="images in each step (default %(default)s)")
    parser.add_argument("--lr", type=float, default=0.03, help="learning rate (default %(default)s)")
    parser.add_argument(
        "--images", type=int, default=1500, help="largest number of training images (default %(default)s)"
    )
    parser.add_argument("--data", default="data", help="folder for MNIST (default %(default)s)")
    parser.add_argument("--checkpoint", help="the server's file, on a file system that all machines share")
    parser.add_argument(
        "--patience", type=float, default=60, help="seconds to wait for a lost server, or trainer (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    parser.add_argument("--losses", help="write the losses of all trainers to this file, as JSON")
    parser.add_argument(
        "--compare", help="a file written by --losses: draw its first curve, too, and print the difference"
    )
    parser.add_argument("--output", default="parameter_server.png", help="the plot (default %(default)s)")
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse_arguments(arguments)
    launch = find_launch()
    if launch is None:
        use_free_port()
        mp.spawn(run, args=(options,), nprocs=1 + options.trainers)
    else:
        options.trainers = launch.world_size - 1
        run(launch.rank, options)


if __name__ == "__main__":
    main()
