"""Profiles of a group of workers: torch.profiler runs on all of them at once, and one trace has one time axis.

docs/profiling.md shows an example.
"""

import contextlib
import functools
import gzip
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import torchrpc.rpc as rpc
from torchrpc._C import _allow_list, _caller, _start_trace, _stop_trace
from torchrpc.rpc._security.allow_list import refused

from ._merge import UNKNOWN_CALL, WorkerTrace, absolute_ns, label, merge, ranges

__all__ = ["profile"]

STOP_TIMEOUT_S = 1.0  # how long the end of a profile waits for functions that still serve calls
CLOCK_PINGS = 20
_OPTIONS = frozenset(("activities", "record_shapes", "profile_memory", "with_stack", "with_flops"))


class profile:
    """Record this worker and others with `torch.profiler` while the block runs, in all their threads.

    Each call appears as a range on both workers, `rpc_async#f(worker0 -> worker1)`: on the caller from the start of the
    call to its completion, on the callee while the function runs. The messages of a backward pass, fetches of RRefs and
    steps of optimizers appear likewise, with the name of their kind: `rpc#BACKWARD_AUTOGRAD_REQ(worker0 -> worker1)`.

    Args:
        workers (list of str): names of the workers to record; default: all of the group. This worker is always
            recorded.
        options: arguments of `torch.profiler.profile` on each worker: `activities`, `record_shapes`, `profile_memory`,
            `with_stack`, `with_flops`. They must be picklable. `schedule` is not supported.

    Attributes:
        local (torch.profiler.profile): this worker's profile, with `events()` and `key_averages()`, after the block.
        traces (dict): worker name -> its Chrome trace, as the dict of its JSON. Times are in microseconds.

    Raises:
        ValueError: the group has no worker with a name in `workers`.
        RuntimeError: on entering, if a profile is under way on one of the workers, or a worker cannot be reached.

    Use an object in one thread. The ranges of functions that still serve calls a second after the block are cut off.

    Example:
        >>> with torchrpc.profiler.profile(record_shapes=True) as prof:
        ...     rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
        >>> prof.export_chrome_trace("trace.json")  # for chrome://tracing or ui.perfetto.dev
    """

    def __init__(self, workers: Iterable[str] | None = None, **options: Any) -> None:
        self._workers = workers
        self._options = options
        self._running: list[rpc.WorkerInfo] = []
        self._recorded: list[WorkerTrace] = []
        self.local: torch.profiler.profile | None = None

    @property
    def traces(self) -> dict[str, Any]:
        """The Chrome trace of each worker, by the worker's name."""
        return {worker.name: worker.trace for worker in self._recorded}

    def key_averages(self, *args: Any, **kwargs: Any) -> Any:
        """Return this worker's events, summed by name: see `torch.profiler.profile.key_averages`. After the block."""
        if self.local is None:
            raise RuntimeError("the profile has no events before its block has ended")
        return self.local.key_averages(*args, **kwargs)

    def export_chrome_trace(self, path: str | Path) -> None:
        """Write one trace: a process per worker, arrows from calls to the functions they run. `.gz` compresses it."""
        opener: Any = gzip.open if str(path).endswith(".gz") else open
        with opener(path, "wt") as file:
            json.dump(merge(self._recorded), file)

    def __enter__(self) -> "profile":
        me = rpc.get_worker_info()
        wanted = None if self._workers is None else set(self._workers)
        infos = rpc.api._get_current_rpc_agent().get_worker_infos()
        if wanted is not None and (unknown := wanted - {info.name for info in infos}):
            raise ValueError(f"no such workers in the group: {', '.join(sorted(unknown))}")
        others = [info for info in infos if info != me and (wanted is None or info.name in wanted)]
        # Start on all workers at once: torch takes seconds for the first profile in a process.
        starting = {info: rpc.rpc_async(info, _start, args=(self._options,)).wait for info in others}
        errors = []
        for info, start in {me: functools.partial(_start, self._options), **starting}.items():
            try:
                start()
                self._running.append(info)
            except Exception as exc:
                errors.append(exc)
        if errors:
            self._stop()
            raise errors[0]
        return self

    def __exit__(self, *_: object) -> None:
        self._recorded = self._stop()

    def _stop(self) -> list[WorkerTrace]:
        me, running, self._running = rpc.get_worker_info(), self._running, []
        stopped = []
        if me in running:
            self.local, trace = _end()
            stopped.append(WorkerTrace(me.name, me.id, trace))
        stopping = {info: rpc.rpc_async(info, _stop, timeout=0) for info in running if info != me}
        for info, packed in stopping.items():
            trace = json.loads(gzip.decompress(packed.wait()))
            stopped.append(WorkerTrace(info.name, info.id, trace, _clock_ahead(info)))
        return stopped


# --- Functions that run on each worker ---

_lock = threading.Lock()
_current: torch.profiler.profile | None = None
_starter: rpc.WorkerInfo | None = None  # the other worker that has started the profile


def _check_profiling() -> None:
    """Raise NotAllowedError if the caller's allow-list lacks profiles: a profile shows the calls of all callers."""
    if (allowed := _allow_list()) is not None and _caller() is not None and not allowed.entry_for(_ENTRY):
        raise refused(_ENTRY, allowed)


_ENTRY = "torchrpc.profiler.profile"


def _start(options: dict[str, Any]) -> None:
    global _current, _starter
    _check_profiling()
    # Options beyond these may contain functions that the profiler calls on this worker.
    if (allowed := _allow_list()) is not None and (unknown := options.keys() - _OPTIONS):
        raise rpc.NotAllowedError(
            f"{allowed.worker} was started with allowed_functions, and takes only these options of a profile: "
            f"{', '.join(sorted(_OPTIONS))}. It does not take {', '.join(sorted(map(str, unknown)))}.",
            allowed.worker,
        )
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with _lock:
        if _current is not None:
            raise RuntimeError(f"a profile is being recorded on {rpc.get_worker_info().name} already")
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # no "USDT:" lines on stderr; read at the first profile
        # A profile has one cycle, so accumulating its events changes nothing; without it, torch 2.11 warns.
        recorder = torch.profiler.profile(experimental_config=everywhere, **{"acc_events": True, **options})
        recorder.start()
        _current, _starter = recorder, _caller()
    _start_trace()


def _end() -> tuple[torch.profiler.profile, dict[str, Any]]:
    """Stop recording; return the profile and its Chrome trace."""
    global _current
    ending = time.time_ns()
    _stop_trace(STOP_TIMEOUT_S)
    with _lock:
        recorder, _current = _current, None
    assert recorder is not None
    recorder.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorder.export_chrome_trace(str(path))
        trace = label(json.loads(path.read_text()))
    # Remove the cut-off range of the call that ends the profile: it is not a call of the program.
    ours = [event for event in ranges(trace, "callee", UNKNOWN_CALL) if absolute_ns(trace, event, end=True) >= ending]
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event not in ours]
    return recorder, trace


def _stop() -> bytes:
    _check_profiling()
    with _lock:
        caller = _caller()
        if caller is not None and _starter != caller:
            starter = "no other worker" if _starter is None else _starter.name
            raise RuntimeError(f"{caller.name} cannot end the profile of {starter}")
    return gzip.compress(json.dumps(_end()[1]).encode(), compresslevel=1)


# --- Clocks ---


def _clock() -> tuple[str, int]:
    """Return the id of this machine's boot and its time, in nanoseconds since 1970."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    with contextlib.suppress(OSError):
        return boot.read_text(), time.time_ns()
    return "", time.time_ns()


def _clock_ahead(worker: rpc.WorkerInfo) -> int:
    """Return how many ns the clock of `worker` is ahead: 0 on the same machine, else exact to half a round trip."""
    if _clock()[0] and rpc.rpc_sync(worker, _clock)[0] == _clock()[0]:
        return 0
    samples = []
    for _ in range(CLOCK_PINGS):
        sent = time.time_ns()
        remote_time = rpc.rpc_sync(worker, _clock)[1]
        received = time.time_ns()
        samples.append((received - sent, remote_time - (sent + received) // 2))
    return min(samples)[1]
