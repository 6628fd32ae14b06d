"""A group of workers, each a process with simulated devices. The process that starts the group is worker "w0".

    import device_group

    device_group.join()  # in a process that has called sim.load()
    rpc.rpc_sync("w1", function, (torch.ones(2, device="sim:0"),))

The other workers serve calls until the process of w0 ends. Functions that they run are in modules of tests/python.
"""

import contextlib
import multiprocessing as mp
import multiprocessing.util
import os
import sys
from pathlib import Path

import torch

import torchrpc.rpc as rpc
from torchrpc.testing import free_port

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
sys.path.insert(0, str(Path(__file__).parent))
import sim

# Worker -> callee -> {device here: device there}.
MAPS = {
    "w0": {
        "w1": {"sim:0": "sim:1", "sim:1": "sim:0"},
        "w2": {"sim:0": "sim:2", "cpu": "sim:3"},
        "w0": {"sim:0": "sim:1", "sim:1": "sim:0"},
    },
    "w1": {"w2": {"sim:1": "sim:2", "sim:3": "cpu"}, "w0": {"sim:3": "sim:1"}},
    "w2": {},
}
_joined = False


def _init(rank, url, maps, options):
    sim.load()
    torch.set_num_threads(1)
    if "identity" in options:
        options = {**options, "identity": options["identity"].format(name=f"w{rank}")}
    settings = rpc.TensorPipeRpcBackendOptions(init_method=url, rpc_timeout=60, **options)
    for callee, device_map in maps[f"w{rank}"].items():
        settings.set_device_map(callee, device_map)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=len(maps), rpc_backend_options=settings)


def _serve(rank, url, maps, options, environment):
    os.environ.update(environment)
    _init(rank, url, maps, options)
    rpc.shutdown()


@contextlib.contextmanager
def group(maps, environment_of_others=None, **options):
    """Run the `with` block as w0 of a group with these device maps.

    All workers have the same `options`, except that {name} in `identity` becomes the name of the worker.
    """
    url = f"tcp://127.0.0.1:{free_port()}"
    context = mp.get_context("spawn")
    others = [
        context.Process(target=_serve, args=(rank, url, maps, options, environment_of_others or {}))
        for rank in range(1, len(maps))
    ]
    for process in others:
        process.start()
    try:
        _init(0, url, maps, options)
        yield
        with contextlib.suppress(rpc.ShutdownError):  # a test has already called shutdown
            rpc.shutdown()
        for process in others:
            process.join(30)
            assert process.exitcode == 0
    finally:
        for process in others:
            process.kill()


def join():
    """Make this process w0 of the group with MAPS, until it ends."""
    global _joined
    if _joined:
        return
    _joined = True
    stack = contextlib.ExitStack()
    stack.enter_context(group(MAPS))
    multiprocessing.util.Finalize(None, stack.close, exitpriority=100)
    os.register_at_fork(after_in_child=stack.pop_all)
