"""Groups of worker processes for tests. No process is left at the end, even if a test fails.

`run_ranks` runs a function in N processes. `workers` makes this process worker0 of a group whose other workers only
serve calls. The rendezvous of a group is a file, so no other program can take its port.
"""

import contextlib
import faulthandler
import multiprocessing as mp
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["RankError", "run_ranks", "workers"]


class RankError(RuntimeError):
    """A process failed; the text has its traceback, or its exit code."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    start_method: str = "spawn",
    timeout: float = 60.0,
    init: bool = True,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Run `fn(rank, *args)` in `world_size` processes and return their results, in the order of ranks.

    Args:
        fn: picklable, unless `start_method` is "fork".
        start_method: "spawn", "fork" or "forkserver".
        timeout: seconds for all processes to end; after it, they print their stacks and are killed.
        init: the processes are `worker0`, `worker1` … of a group while `fn` runs; afterwards the group is shut down.
            False: `fn` calls init_rpc itself; MASTER_ADDR and MASTER_PORT are set.
        env: environment variables of the processes.

    Raises:
        RankError: a process raised, died or did not end in time. All have been killed by then.
    """
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}/store" if init else None
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **(env or {})}
        group = _Processes(start_method, timeout)
        with group:
            for rank in range(world_size):
                group.start(rank, _run, fn, args, rank, world_size, url, variables)
            return group.results()


@contextlib.contextmanager
def workers(
    world_size: int, start_method: str = "forkserver", timeout: float = 60.0, **options: Any
) -> Iterator[list[str]]:
    """Be worker0 of a group while the block runs; yields the names of all workers. The others serve calls.

    Args:
        start_method: "spawn", "fork" or "forkserver".
        timeout: seconds in which the other workers must end after the block.
        options: for TensorPipeRpcBackendOptions, the same for all.

    Raises:
        RankError: one of the other workers raised or died, or did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}/store"
        group = _Processes(start_method, timeout)
        with group:
            for rank in range(1, world_size):
                group.start(rank, _serve, rank, world_size, url, options)
            _join(0, world_size, url, **options)
            import torchrpc.rpc as rpc

            try:
                yield [f"worker{rank}" for rank in range(world_size)]
            finally:
                group.end(timeout)
                if rpc._is_current_rpc_agent_set():  # the block may have shut it down
                    rpc.shutdown(timeout=timeout)
            group.results()


def free_port() -> int:
    """Return a TCP port on which no process listens now."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class _Processes:
    """Child processes; the end of the block kills those that still run."""

    def __init__(self, start_method: str, timeout: float) -> None:
        self.context: Any = mp.get_context(start_method)
        if start_method == "forkserver":
            self.context.set_forkserver_preload(["torchrpc.testing._preload"])
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        self.running: dict[Any, tuple[int, Any]] = {}  # connection -> rank, process
        self.processes: list[Any] = []
        self.values: dict[int, Any] = {}

    def start(self, rank: int, body: Callable[..., Any], *args: Any) -> None:
        parent_end, child_end = self.context.Pipe()
        process = self.context.Process(target=_child, args=(child_end, body, args), daemon=True)
        process.start()
        child_end.close()
        self.running[parent_end] = rank, process
        self.processes.append(process)

    def end(self, timeout: float) -> None:
        """Tell the workers that serve calls to end within `timeout` seconds."""
        self.deadline = time.monotonic() + timeout
        for connection in self.running:
            with contextlib.suppress(OSError):  # the process has died, which results() reports
                connection.send("end")

    def results(self) -> list[Any]:
        """Wait until all processes have ended; return their results."""
        while self.running:
            ready = multiprocessing.connection.wait(list(self.running), max(self.deadline - time.monotonic(), 0))
            if not ready:
                self.dump_stacks()
                ranks = sorted(rank for rank, _ in self.running.values())
                raise RankError(f"ranks {ranks} did not end in {self.timeout:g} s; their stacks are on stderr.")
            # Report a process that died first: others may have failed because of it.
            for connection in sorted(ready, key=lambda ready: self.running[ready][1].exitcode in (None, 0)):
                self.collect(connection)
        return [self.values[rank] for rank in sorted(self.values)]

    def collect(self, connection: Any) -> None:
        rank, process = self.running.pop(connection)
        try:
            failed, value = connection.recv()
        except (EOFError, ConnectionResetError):
            process.join(5)
            raise RankError(f"rank {rank} died (exit code {process.exitcode}).") from None
        if failed:
            raise RankError(f"rank {rank} failed:\n{value}")
        self.values[rank] = value

    def dump_stacks(self) -> None:
        import signal

        for _, process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)

    def __enter__(self) -> "_Processes":
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        for process in self.processes:
            if kind is None:
                process.join(max(self.deadline - time.monotonic(), 1))
            if process.is_alive():
                process.kill()
            process.join()


def _child(connection: Any, body: Callable[..., Any], args: tuple) -> None:
    import signal

    faulthandler.register(signal.SIGUSR1)
    try:
        outcome = (False, body(connection, *args))
    except BaseException:
        outcome = (True, traceback.format_exc())
    connection.send(outcome)
    connection.close()


def _run(
    _: Any, fn: Callable[..., Any], args: tuple, rank: int, world_size: int, url: str | None, variables: dict[str, str]
) -> Any:
    os.environ.update(variables)
    if url is None:
        return fn(rank, *args)
    import torchrpc.rpc as rpc

    _join(rank, world_size, url)
    try:
        value = fn(rank, *args)
    except BaseException:
        rpc.shutdown(graceful=False)
        raise
    rpc.shutdown()
    return value


def _serve(connection: Any, rank: int, world_size: int, url: str, options: dict[str, Any]) -> None:
    import torchrpc.rpc as rpc

    _join(rank, world_size, url, **options)
    connection.recv()  # EOFError if the parent process has ended
    rpc.shutdown()


def _join(rank: int, world_size: int, url: str, **options: Any) -> None:
    import torch

    import torchrpc.rpc as rpc

    torch.set_num_threads(1)  # there are many processes on few cores, and a thread pool does not survive a fork
    rpc.init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=url, **options),
    )
