"""How tests wait for other threads and processes."""

import os
import signal
import time
from pathlib import Path


def eventually(check, seconds=60):
    """Wait until `check()` is true; return what it returned."""
    end = time.monotonic() + seconds
    while not (result := check()):
        assert time.monotonic() < end, "did not come true"
        time.sleep(0.01)
    return result


def remains(check, seconds=0.2):
    """Give what would be wrong the time to happen: `check()` is true for that long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert check(), "did not remain true"
        time.sleep(0.01)


def stop(pid):
    """Stop a process by SIGSTOP. Its threads do not stop at once, but have when this returns."""

    def has_stopped():
        try:
            stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
        except OSError:  # a thread has ended meanwhile
            return False
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    os.kill(pid, signal.SIGSTOP)
    eventually(has_stopped)
