"""Defines rows and how they are timed; the rows themselves are in pair_rows.py and group_rows.py.

A row is a function of a Meter that runs on worker0 of a group and returns one number. It is written for
`torch.distributed.rpc`. Only the environment of the processes decides whether that is torch's RPC or torchrpc.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SECONDS, RATE, CPU_SECONDS, PERCENT, MEBIBYTES = "time", "/s", "CPU s", "% of a core", "MiB"


@dataclass(frozen=True)
class Row:
    name: str
    session: str  # the rows of a session run one after the other in one group of fresh processes
    world_size: int
    unit: str  # one of the constants above
    targets: dict[str, float]  # transport -> required ratio to the baseline
    run: Callable  # takes a Meter; runs on worker0
    other: Callable | None  # the same for systems with another API; takes a Meter and an adapter's peer
    bare: bool  # `run` runs on every worker before RPC is initialised

    @property
    def more_is_better(self) -> bool:
        return self.unit == RATE


ROWS: dict[str, Row] = {}


def row(name, session, *, workers=2, unit=SECONDS, targets=(), other=None, bare=False):
    """Add a function to ROWS; `targets` are those for the default transport and for TCP."""

    def register(run):
        by_transport = dict(zip(("default", "tcp"), targets, strict=False))
        ROWS[name] = Row(name, session, workers, unit, by_transport, run, other, bare)
        return run

    return register


@dataclass(frozen=True)
class Meter:
    budget: float  # seconds to spend on a measurement
    rank: int = 0
    world_size: int = 1
    init_method: str = ""  # for bare rows: the rendezvous of the group
    options: dict = field(default_factory=dict)  # for bare rows: options of the RPC backend
    store: Any = None  # for bare rows: a c10d.Store of the group

    def latency(self, call: Callable[[], object], least: int = 5) -> float:
        """Return the median seconds of a call, after a warm-up of a quarter of the budget."""
        self._repeat(call, self.budget / 4, 2)
        return statistics.median(self._repeat(call, self.budget, least))

    def rate(self, burst: Callable[[int], object], count: int) -> float:
        """Return the median calls per second of bursts of `count` calls."""
        return count / self.latency(lambda: burst(count), least=3)

    def long_run(self, run: Callable[[int], object]) -> tuple[int, float]:
        """Run `run(count)` with a count that takes about the budget; return (count, seconds)."""
        run(3)
        count, seconds = 3, 0.0
        while True:
            begin = time.perf_counter()
            run(count)
            seconds = time.perf_counter() - begin
            if seconds > self.budget / 4:
                break
            count = min(4 * count, int(count * self.budget / 3 / seconds) + 1)
        count = max(1, int(count * self.budget / seconds))
        begin = time.perf_counter()
        run(count)
        return count, time.perf_counter() - begin

    def _repeat(self, call: Callable[[], object], budget: float, least: int) -> list[float]:
        times: list[float] = []
        end = time.perf_counter() + budget
        while len(times) < least or time.perf_counter() < end:
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return times
