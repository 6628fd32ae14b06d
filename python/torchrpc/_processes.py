"""Child processes that are workers of one group with this process, and their results and failures.

Each object is used by one thread, preferably the main thread.
"""

import _thread
import contextlib
import faulthandler
import itertools
import multiprocessing as mp
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["PRELOADED", "Processes", "RankError", "context_of", "join_group", "run_in_environment"]

PRELOADED = ["torchrpc.testing._preload"]  # what the fork server imports once for all its children


class RankError(RuntimeError):
    """A process failed; the text has its traceback, or its exit code."""

    __module__ = "torchrpc"


def context_of(start_method: str) -> Any:
    """Return the context of multiprocessing. Its fork server, which one process has once, imports PRELOADED."""
    context: Any = mp.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    return context


def run_in_environment(environment: dict[str, str], body: Callable[..., Any], *args: Any) -> Any:
    """Run `body(*args)` with these environment variables; a child of the fork server begins with the server's."""
    os.environ.clear()
    os.environ.update(environment)
    return body(*args)


class Processes:
    """Child processes; the end of the block kills those that still run."""

    def __init__(self, start_method: str, timeout: float) -> None:
        self.context: Any = context_of(start_method)
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        self.running: dict[Any, tuple[int, Any]] = {}  # connection -> rank, process
        self.processes: list[Any] = []
        self.values: dict[int, Any] = {}
        self.mark = f"{os.getpid()}.{next(_numbers)}"
        _all.add(self)

    def start(self, rank: int, body: Callable[..., Any], *args: Any) -> None:
        parent_end, child_end = self.context.Pipe()
        arguments = ({**os.environ, _MARK: self.mark}, _child, child_end, body, args)
        process = self.context.Process(target=run_in_environment, args=arguments, daemon=True)
        process.start()
        child_end.close()
        self.running[parent_end] = rank, process
        self.processes.append(process)

    def end(self, timeout: float) -> None:
        """Tell the workers that serve calls to end within `timeout` seconds."""
        self.deadline = time.monotonic() + timeout
        for connection in self.running:
            with contextlib.suppress(OSError):  # the process has died; results() reports that
                connection.send("end")

    def results(self) -> list[Any]:
        """Wait until all processes have ended; return their results."""
        while self.running:
            ready = multiprocessing.connection.wait(list(self.running), max(self.deadline - time.monotonic(), 0))
            if not ready:
                self.dump_stacks()
                ranks = sorted(rank for rank, _ in self.running.values())
                raise RankError(f"ranks {ranks} did not end in {self.timeout:g} s; their stacks are on stderr.")
            # Begin with a process that died: its death may be the cause of the other failures.
            for connection in sorted(ready, key=lambda ready: self.running[ready][1].exitcode in (None, 0)):
                self.collect(connection)
        return [self.values[rank] for rank in sorted(self.values)]

    def collect(self, connection: Any) -> None:
        rank, process = self.running.pop(connection)
        try:
            failed, value = connection.recv()
        except (EOFError, ConnectionResetError):
            process.join(5)
            raise RankError(f"rank {rank} died (exit code {process.exitcode}).{self.advice(process)}") from None
        if failed:
            raise RankError(f"rank {rank} failed:\n{value}")
        self.values[rank] = value

    def advice(self, process: Any) -> str:
        """Return advice for a process that, probably, could not import the script; else an empty text."""
        script = getattr(sys.modules["__main__"], "__file__", None)
        if process.exitcode != 1 or script is None or self.context.get_start_method() == "fork":
            return ""
        return (
            f" It runs {os.path.basename(script)} again: what only this process should do, such as starting workers, "
            'belongs below `if __name__ == "__main__":` there.'
        )

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Raise RankError in the block as soon as a process has failed. Does nothing off the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        stop, stopped = self.context.Pipe(duplex=False)
        failed = threading.Event()
        former = signal.getsignal(signal.SIGINT)

        def interrupt(number: int, frame: Any) -> None:
            if failed.is_set():
                raise KeyboardInterrupt
            if callable(former):
                former(number, frame)
            elif former == signal.SIG_DFL:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)

        def wait_for_failure() -> None:
            ready = multiprocessing.connection.wait([stop, *self.running])
            if stop not in ready:
                failed.set()
                _thread.interrupt_main()  # like Ctrl-C; this ends the wait of init_rpc

        # interrupt_main() calls the handler of SIGINT, and does nothing if SIGINT is ignored. A script that a shell
        # starts in the background ignores SIGINT.
        if former is not None:  # else the handler was not installed by Python
            signal.signal(signal.SIGINT, interrupt)
        watcher = threading.Thread(target=wait_for_failure, name="torchrpc.watch")
        watcher.start()
        try:
            try:
                yield
            finally:
                stopped.send(None)
                watcher.join()
                if former is not None:
                    signal.signal(signal.SIGINT, former)
        except BaseException:
            if not failed.is_set():
                raise
        finally:
            stop.close()
            stopped.close()
        if failed.is_set():
            self.results()  # raises the error of the process

    def dump_stacks(self) -> None:
        for _, process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        for process in self.processes:
            if kind is None:
                process.join(max(self.deadline - time.monotonic(), 1))
            if process.is_alive():
                process.kill()
            process.join()
        _end_programs(self.mark)


_numbers = itertools.count()
_all: "weakref.WeakSet[Processes]" = weakref.WeakSet()


def _leave_processes_to_parent() -> None:
    """Let a forked child end without its parent's processes: multiprocessing would terminate them as its own."""
    for group in list(_all):
        for process in group.processes:
            getattr(mp.process, "_children", set()).discard(process)


os.register_at_fork(after_in_child=_leave_processes_to_parent)

_MARK = "TORCHRPC_STARTED_BY"  # a variable of the environment of the workers, and so of the programs that they start
# Programs of Python and torch that end by themselves after their last user, and then remove what it has left behind.
_CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
_PROGRAM_GRACE_S = 1.0


def _end_programs(mark: str) -> None:
    """End the programs that workers with this mark have started, and those that these have started.

    A spawned process is such a program, and so is one of subprocess. They have a second to end after SIGTERM.
    """
    deadline = time.monotonic() + _PROGRAM_GRACE_S
    told: set[int] = set()
    while programs := _programs_with(mark):
        is_late = time.monotonic() > deadline
        for pid in programs:
            if is_late or pid not in told:
                told.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
        time.sleep(0.01)  # between two looks at processes that end


def _programs_with(mark: str) -> list[int]:
    """Return the processes whose program was started with this mark. Forked workers have it only in Python's memory."""
    entry = f"{_MARK}={mark}".encode()
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            folder = Path("/proc", pid)
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes()
                if not any(cleaner in command for cleaner in _CLEANERS):
                    found.append(int(pid))
    return found


_ORPHAN_S = 10.0  # how long a process may run on after the end of its parent process


class _Lifeline:
    """Ends the processes that this process forks, and those that they fork, as soon as this process has ended.

    They have a pipe to which only this process holds the writing end, so its end, by SIGKILL too, closes the pipe. The
    parent-death signal of prctl() would come when the thread that forked ends.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.register_at_fork(after_in_child=self._follow)

    def _follow(self) -> None:
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1
        threading.Thread(target=self._end_with_it, name="torchrpc.lifeline", daemon=True).start()

    def _end_with_it(self) -> None:
        os.read(self._reader, 1)
        os.kill(os.getpid(), signal.SIGKILL)


def _end_with_parent() -> None:
    parent: Any = mp.parent_process()
    multiprocessing.connection.wait([parent.sentinel])
    time.sleep(_ORPHAN_S)
    _end_programs(os.environ[_MARK])
    os.kill(os.getpid(), signal.SIGKILL)


def _child(connection: Any, body: Callable[..., Any], args: tuple) -> None:
    faulthandler.register(signal.SIGUSR1)
    mp.current_process().daemon = False  # it may have child processes, such as those of a DataLoader
    _Lifeline()
    threading.Thread(target=_end_with_parent, name="torchrpc.parent", daemon=True).start()
    try:
        outcome = (False, body(connection, *args))
    except BaseException:
        outcome = (True, traceback.format_exc())
    for process in mp.active_children():
        if not process.daemon:  # multiprocessing ends the others, and pools with their workers, but would wait for this
            process.terminate()
    connection.send_bytes(_pickled(outcome))
    connection.close()


def _pickled(outcome: tuple[bool, Any]) -> bytes:
    """By value: multiprocessing would send a tensor as a file descriptor, which this process must live to hand over."""
    try:
        return pickle.dumps(outcome)
    except Exception:
        text = traceback.format_exc()
        return pickle.dumps((True, f"its result, a {type(outcome[1]).__name__}, cannot be pickled:\n{text}"))


def serve(connection: Any, rank: int, world_size: int, url: str, threads: int, options: dict[str, Any]) -> None:
    """Join the group and serve calls until the parent process says to end, or has ended. The body of a process."""
    import torch

    import torchrpc.rpc as rpc

    torch.set_num_threads(threads)
    join_group(rank, world_size, url, **options)
    connection.recv()  # EOFError if the parent process has ended
    rpc.shutdown()


def join_group(rank: int, world_size: int, url: str, **options: Any) -> None:
    import torchrpc.rpc as rpc

    rpc.init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=url, **options),
    )
