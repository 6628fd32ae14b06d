"""Groups of worker processes for tests. No process is left at the end, even if a test fails.

`run_ranks` runs a function in N processes. `workers` makes this process worker0 of a group whose other workers only
serve calls. The rendezvous of a group is a file, so no other program can take its port.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from torchrpc._local_group import local_group
from torchrpc._processes import Processes, RankError, context_of, join_group, run_in_environment

__all__ = ["RankError", "run_ranks", "workers"]


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    start_method: str = "forkserver",
    timeout: float = 60.0,
    init: bool = True,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Run `fn(rank, *args)` in `world_size` processes and return their results, in the order of ranks.

    Args:
        fn: a function, which must be picklable unless `start_method` is "fork".
        start_method: "forkserver", "spawn" or "fork". A fork server imports torch once for all groups of this process.
        timeout: seconds within which all processes must end. Otherwise they print their stacks and are killed.
        init: if True, the processes are `worker0`, `worker1` … of a group while `fn` runs, and the group is shut down
            afterwards. If False, `fn` calls init_rpc itself; MASTER_ADDR and MASTER_PORT are set. A process that
            returns without shutdown() ends at once, and is lost for the others.
        env: environment variables of the processes.

    Raises:
        RankError: a process raised, died, did not end in time, or returned what cannot be pickled. No process is left
            then.
    """
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}/store" if init else None
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **(env or {})}
        group = Processes(start_method, timeout)
        with group:
            for rank in range(world_size):
                group.start(rank, _run, fn, args, rank, world_size, url, variables)
            return group.results()


@contextlib.contextmanager
def workers(
    world_size: int, start_method: str = "forkserver", timeout: float = 60.0, **options: Any
) -> Iterator[list[str]]:
    """Make this process worker0 of a group for the block; yield the names of all workers. The others serve calls.

    Args:
        start_method: "spawn", "fork" or "forkserver".
        timeout: seconds within which the other workers must end after the block.
        options: arguments of TensorPipeRpcBackendOptions, the same for all workers.

    Raises:
        RankError: one of the other workers raised or died, or did not end in time.
    """
    import torch

    torch.set_num_threads(1)  # many processes share few cores, and a thread pool does not survive a fork
    with local_group(world_size, start_method=start_method, timeout=timeout, threads=1, **options) as group:
        yield group.names


def start_process(fn: Callable[..., Any], *args: Any, daemon: bool = False) -> Any:
    """Start a process that runs `fn(*args)`, and return it (a `multiprocessing.Process`).

    It is forked from a server process that has imported torch and torchrpc, so it starts within milliseconds. It gets
    the environment variables of this process.
    """
    arguments = (dict(os.environ), fn, *args)
    process = context_of("forkserver").Process(target=run_in_environment, args=arguments, daemon=daemon)
    process.start()
    return process


_given_ports: set[int] = set()  # by free_port() of this process


def free_port() -> int:
    """Return a TCP port on which no process listens now, at any address of this machine.

    The system gives it to no outgoing connection either: Linux chooses ports for these from 32768 on. The workers of
    pytest-xdist get ports of different ranges, since two of them could choose one port before either listens. For the
    same reason a process gets no port twice until it has had half of them.
    """
    import errno
    import secrets
    import socket

    begin, size = 20000, 32768 - 20000
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")  # "gw3"
    if worker.isdecimal():
        size //= 16
        begin += size * (int(worker) % 16)
    if len(_given_ports) > size // 2:
        _given_ports.clear()
    while True:
        port = begin + secrets.randbelow(size)
        if port in _given_ports:
            continue
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
            else:
                _given_ports.add(port)
                return port


def _run(
    _: Any, fn: Callable[..., Any], args: tuple, rank: int, world_size: int, url: str | None, variables: dict[str, str]
) -> Any:
    os.environ.update(variables)
    if url is None:
        return fn(rank, *args)
    import torch

    import torchrpc.rpc as rpc

    torch.set_num_threads(1)
    join_group(rank, world_size, url)
    try:
        value = fn(rank, *args)
    except BaseException:
        rpc.shutdown(graceful=False)
        raise
    rpc.shutdown()
    return value
