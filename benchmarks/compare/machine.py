"""Describes the machine, and measures how much of it other processes use during a measurement."""

import os
import re
import resource
import time


def describe() -> dict:
    with open("/proc/cpuinfo") as file:
        model = re.search(r"model name\s*: (.*)", file.read())
    return {
        "cpu": model[1] if model else "unknown",
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": os.uname().release,
        "load_before": os.getloadavg()[0],
    }


class OtherLoad:
    """The share of all processors used since the start by processes other than this one and its ended children."""

    def __init__(self):
        self.begin = self._now()

    def share(self) -> float:
        busy, total, own = (now - before for now, before in zip(self._now(), self.begin, strict=True))
        return max(0.0, (busy - own) / total) if total else 0.0

    @staticmethod
    def _now() -> tuple[float, float, float]:
        with open("/proc/stat") as file:
            ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in file.readline().split()[1:9]]
        used = [resource.getrusage(target) for target in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        idle = ticks[3] + ticks[4]
        return sum(ticks) - idle, sum(ticks), sum(each.ru_utime + each.ru_stime for each in used)


def wait_for_quiet(timeout_s: float, share: float = 0.1) -> None:
    """Wait until other processes use less than `share` of the processors, but no longer than `timeout_s`."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        other_load = OtherLoad()
        time.sleep(0.5)
        if other_load.share() < share:
            return
