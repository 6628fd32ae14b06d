"""Trainers that share a model on a parameter server, through distributed autograd and DistributedOptimizer.

The server holds a convolutional network. A trainer calls the server to run it, computes the loss itself, and starts a
backward pass that continues through the call on the server. The gradients stay on the server, in the context of the
pass, and a DistributedOptimizer applies them there. The data are MNIST where torchvision is installed, otherwise
scikit-learn's handwritten digits, scaled up to the same size.

Written for torch.distributed.*; runs unchanged on torchrpc:

    python parameter_server.py --losses torch.json             # on torch's own RPC
    python -m torchrpc parameter_server.py --compare torch.json  # on torchrpc; both curves in one picture
    python -m torchrpc parameter_server.py --trainers 2
    python -m torchrpc parameter_server.py --device cuda         # the model and the data on a GPU

The structure follows the parameter server tutorial on pytorch.org. These points are corrected:

- All processes are started by one command.
- With two trainers torch's optimizer fails with "one of the variables needed for gradient computation has been
  modified by an inplace operation", because one trainer's step changes the parameters between the other's forward and
  backward pass. On torchrpc the optimizer is lock-free; see `make_optimizer`.
- The accuracy was computed with dropout enabled, because `eval()` was applied to the trainer's object, which has no
  layers. Now the server measures it when all trainers have finished.
- Every step fetched all gradients to check that the server has some. Now this is done once in each epoch.
- The dropout between the linear layers is `Dropout`, not `Dropout2d`.
"""

import argparse
import inspect
import json
import os
import socket
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional as F
from tqdm import tqdm

# --- The data ---
# Images of handwritten digits, 28 by 28 pixels.


def load_data(options):
    """Images (n, 1, 28, 28) of mean 0 and variance 1, and labels (n,): one part for training, one for the test."""
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


# --- The server ---
# The model is on the server only. Trainers call `forward` through an RRef; the server keeps each call's graph
# in the autograd context of the trainer's pass.


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
    """Created on the worker "parameter_server"; trainers call its methods. Several calls may run at the same time."""

    def __init__(self, device):
        super().__init__()
        self.model = Net().to(device)

    def forward(self, images):
        return self.model(images)

    def get_dist_gradients(self, context_id):
        """The gradients of one trainer's pass, {parameter: gradient}. Other trainers have other contexts."""
        return dist_autograd.get_gradients(context_id)

    def get_param_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.model.parameters()]


# The only instance; the first call of a trainer creates it.
parameter_server = None
parameter_server_lock = threading.Lock()


def get_parameter_server(device):
    global parameter_server
    with parameter_server_lock:
        if parameter_server is None:
            parameter_server = ParameterServer(device)
        return parameter_server


def run_parameter_server(options, folder):
    torch.manual_seed(options.seed)
    rpc.init_rpc("parameter_server", rank=0, world_size=1 + options.trainers)
    rpc.shutdown()  # serves calls until every trainer has finished
    _, (images, labels) = load_data(options)
    model = parameter_server.model.eval()
    with torch.no_grad():
        accuracy = (model(images.to(options.device)).argmax(dim=1).cpu() == labels).float().mean().item()
    (folder / "accuracy.json").write_text(json.dumps(accuracy))


# --- The trainers ---
# `TrainerNet` looks like a local module: its forward pass is a remote call. The loss is computed here, and
# `dist_autograd.backward` goes back through the call. The optimizer steps where the parameters are.


def call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def remote_method(method, rref, *args, **kwargs):
    """Calls a method of the object behind `rref` on its owner, and waits for the result."""
    return rpc.rpc_sync(rref.owner(), call_method, args=(method, rref, *args), kwargs=kwargs)


class TrainerNet(nn.Module):
    """Stands for the network on a trainer; holds a reference to the server."""

    def __init__(self, device):
        super().__init__()
        self.param_server_rref = rpc.remote("parameter_server", get_parameter_server, args=(device,))

    def get_global_param_rrefs(self):
        return remote_method(ParameterServer.get_param_rrefs, self.param_server_rref)

    def forward(self, images):
        return remote_method(ParameterServer.forward, self.param_server_rref, images)


def make_optimizer(param_rrefs, options):
    """SGD on the server; lock-free if there are several trainers and the optimizer supports it.

    By default a step marks the parameters as modified. If another trainer has run its forward pass before the step, its
    backward pass then fails, because its gradients would mix old activations with new parameters. Lock-free steps do
    not mark the parameters and do not wait for each other. So some gradients are inexact in this way, and of two
    simultaneous steps one may be lost in some elements. With few trainers and small steps the training still converges
    (Hogwild!, Niu et al., 2011).
    """
    can_be_lock_free = "lock_free" in inspect.signature(DistributedOptimizer.__init__).parameters
    settings = {"lock_free": True} if can_be_lock_free and options.trainers > 1 else {}
    return DistributedOptimizer(optim.SGD, param_rrefs, lr=options.lr, **settings)


def batches(images, labels, options, generator):
    order = torch.randperm(len(labels), generator=generator)
    for part in order.split(options.batch):
        yield images[part], labels[part]


def run_trainer(rank, options, folder):
    settings = rpc.TensorPipeRpcBackendOptions()
    if options.device != "cpu":  # images there, predictions and gradients back
        settings.set_device_map("parameter_server", {f"{options.device}:0": f"{options.device}:0"})
    rpc.init_rpc(f"trainer_{rank}", rank=rank, world_size=1 + options.trainers, rpc_backend_options=settings)
    (images, labels), _ = load_data(options)
    images, labels = images[rank - 1 :: options.trainers], labels[rank - 1 :: options.trainers]
    generator = torch.Generator().manual_seed(1000 * options.seed + rank)
    net = TrainerNet(options.device)
    optimizer = make_optimizer(net.get_global_param_rrefs(), options)

    losses = []
    bar = tqdm(total=options.epochs * -(-len(labels) // options.batch), desc=f"trainer {rank}", position=rank - 1)
    for _ in range(options.epochs):
        for step, (data, target) in enumerate(batches(images, labels, options, generator)):
            data, target = data.to(options.device), target.to(options.device)
            with dist_autograd.context() as context_id:
                loss = F.nll_loss(net(data), target)
                dist_autograd.backward(context_id, [loss])
                if step == 0:
                    assert remote_method(ParameterServer.get_dist_gradients, net.param_server_rref, context_id) != {}
                optimizer.step(context_id)
            losses.append(loss.item())
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
            bar.update()
    bar.close()
    (folder / f"trainer{rank}.json").write_text(json.dumps(losses))
    rpc.shutdown()


def run(rank, options, folder):
    torch.set_num_threads(1)  # the processes share the cores
    if rank == 0:
        run_parameter_server(options, folder)
    else:
        run_trainer(rank, options, folder)


# --- The results ---
# The curves are means over the steps around each one.


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


def use_free_port():
    """Sets the address of the rendezvous, unless the environment has it."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        os.environ.setdefault("MASTER_PORT", str(probe.getsockname()[1]))


def parse_arguments():
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
    parser.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    parser.add_argument("--losses", help="write the losses of all trainers to this file, as JSON")
    parser.add_argument(
        "--compare", help="a file written by --losses: draw its first curve, too, and print the difference"
    )
    parser.add_argument("--output", default="parameter_server.png", help="the plot (default %(default)s)")
    return parser.parse_args()


def main():
    options = parse_arguments()
    use_free_port()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(options, Path(folder)), nprocs=1 + options.trainers)
        names = [f"trainer{rank}" for rank in range(1, 1 + options.trainers)]
        curves = {name: json.loads(Path(folder, f"{name}.json").read_text()) for name in names}
        accuracy = json.loads(Path(folder, "accuracy.json").read_text())
    if options.losses:
        Path(options.losses).write_text(json.dumps(curves))
    first = curves["trainer1"]
    start, end = mean([losses[0] for losses in curves.values()]), mean([mean(v[-10:]) for v in curves.values()])
    if options.compare:
        other = next(iter(json.loads(Path(options.compare).read_text()).values()))
        curves[options.compare] = other
        distance = max(abs(a - b) for a, b in zip(first, other, strict=True))
        print(f"largest difference to {options.compare}: {distance:.2e}")
    plot(curves, accuracy, options)
    print(f"loss {start:.3f} at the start, {end:.3f} at the end; accuracy {accuracy:.1%}; curve in {options.output}")


if __name__ == "__main__":
    main()
