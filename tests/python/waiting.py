"""How tests wait for other threads and processes."""

import time


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
