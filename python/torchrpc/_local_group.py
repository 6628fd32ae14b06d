"""`local_group`: a group of worker processes on this machine, for notebooks, scripts and tests."""

import os
import shutil
import tempfile
import weakref
from typing import Any

from ._processes import Processes, RankError, join_group, serve

__all__ = ["LocalGroup", "RankError", "local_group"]


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:  # in a forked child, the folder is its parent's
        shutil.rmtree(folder, ignore_errors=True)


_open_groups: set["LocalGroup"] = set()  # a group lives on if the program has not kept it


class LocalGroup:
    """A group of this process and of child processes that only serve calls, as `local_group` returns it.

    Attributes:
        names (list of str): the names of the workers, by rank; `names[0]` is this process.
    """

    def __init__(
        self, world_size: int, start_method: str, timeout: float, threads: int | None, options: dict[str, Any]
    ) -> None:
        import torch

        import torchrpc.rpc as rpc
        from torchrpc._C import _MAX_WORLD_SIZE
        from torchrpc.rpc._calls.checks import check_count, check_seconds

        check_count("world_size", world_size, _MAX_WORLD_SIZE)
        check_seconds(timeout, "Pass the seconds within which the other workers must end.")
        if threads is not None:
            check_count("threads", threads)
        methods = ("forkserver", "spawn", "fork")
        if start_method not in methods:
            raise ValueError(f"start_method must be one of {', '.join(methods)}, but is {start_method!r}.")
        self.names = [f"worker{rank}" for rank in range(world_size)]
        self._timeout = timeout
        self._pid = os.getpid()
        folder = tempfile.mkdtemp()
        self._remove_folder = weakref.finalize(self, _remove, folder, self._pid)
        self._processes: Processes | None = Processes(start_method, timeout)
        url = f"file://{folder}/store"
        share = threads or max(1, torch.get_num_threads() // world_size)
        try:
            for rank in range(1, world_size):
                self._processes.start(rank, serve, rank, world_size, url, share, options)
            with self._processes.watch():
                join_group(0, world_size, url, **options)
            _open_groups.add(self)
            rpc.api._end_started_workers = self._tell_to_end
        except BaseException as error:
            self._end(type(error))
            raise

    def _tell_to_end(self) -> None:
        if self._processes is not None and os.getpid() == self._pid:
            self._processes.end(self._timeout)

    def _end(self, kind: Any) -> None:
        import torchrpc.rpc as rpc

        processes, self._processes = self._processes, None
        _open_groups.discard(self)
        if rpc.api._end_started_workers == self._tell_to_end:
            rpc.api._end_started_workers = None
        if processes is not None:
            processes.__exit__(kind)
        self._remove_folder()

    def close(self) -> None:
        """End all workers. A second call does nothing, and neither does one in a forked child of this process.

        Raises:
            RankError: a worker has raised or died, or did not end in time; the text names it. No worker is left then.
        """
        import torchrpc.rpc as rpc

        if self._processes is None or os.getpid() != self._pid:
            return
        kind: Any = RankError
        try:
            self._tell_to_end()
            try:
                if rpc._is_current_rpc_agent_set():  # the program may have shut it down
                    rpc.shutdown(timeout=self._timeout)
            except rpc.WorkerLostError:
                self._processes.results()  # raises the error of the process that failed
                raise
            self._processes.results()
            kind = None
        finally:
            self._end(kind)

    def __enter__(self) -> "LocalGroup":
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            self.close()
        except RuntimeError:
            if kind is None:  # else report the error of the block instead
                raise

    def __repr__(self) -> str:
        state = "closed" if self._processes is None else f"{len(self.names)} workers, process {os.getpid()} is worker0"
        return f"LocalGroup({state})"


def local_group(
    world_size: int,
    *,
    start_method: str = "forkserver",
    timeout: float = 60.0,
    threads: int | None = None,
    **options: Any,
) -> LocalGroup:
    """Start `world_size - 1` processes on this machine that serve calls, and make this process worker0 of their group.

    It works in notebooks, too. The group ends with the `with` block, or by `close()`.

    Args:
        world_size (int): the number of workers, including this process.
        start_method (str): "forkserver", "spawn" or "fork", as in multiprocessing. With the first two, a script must
            start the group below `if __name__ == "__main__":`, and cannot come from standard input.
        timeout (float): seconds within which the other workers must end.
        threads (int): torch threads in each of the other workers; default: an equal share of this process's number.
        options: arguments of TensorPipeRpcBackendOptions, the same for all workers.

    Raises:
        RankError: a process raised or died before the group had formed. The end of the `with` block and `close()` raise
            it if a process failed while it served. The text has the traceback or exit code. No process is left.
        ShutdownError, RpcError: as `init_rpc`.
        TypeError, ValueError: an argument of the wrong kind; the text names it.

    The group lives until `close()`, the end of the `with` block or the end of the program. Call it on the main thread.
    On another thread, the death of a process while the group forms is noticed only after TORCHRPC_INIT_TIMEOUT.
    Processes and programs that a worker has started end with the group: after SIGTERM, they have a second.

    Example:
        >>> with torchrpc.local_group(3) as group:
        ...     rpc.rpc_sync(group.names[1], torch.add, args=(torch.ones(2), 1))
        tensor([2., 2.])
    """
    return LocalGroup(world_size, start_method, timeout, threads, options)
