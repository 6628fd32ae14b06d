"""What the results were measured on, and how much of it others took meanwhile."""

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


class OthersShare:
    """The share of all processors that others than this process and its ended children have had since the start."""

    def __init__(self):
        self.begin = self._now()

    def share(self) -> float:
        busy, total, own = (now - before for now, before in zip(self._now(), self.begin, strict=True))
        return max(0.0, (busy - own) / total) if total else 0.0

    @staticmethod
    def _now() -> tuple[float, float, float]:
        with open("/proc/stat") as file:
            ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in file.readline().split()[1:9]]
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        idle = ticks[3] + ticks[4]
        return sum(ticks) - idle, sum(ticks), sum(each.ru_utime + each.ru_stime for each in used)


def wait_for_quiet(patience: float, share: float = 0.1) -> None:
    """Until others leave the processors alone, but no longer than `patience` seconds."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        others = OthersShare()
        time.sleep(0.5)
        if others.share() < share:
            return
