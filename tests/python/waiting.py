"""How tests wait for other threads and processes."""

import time


def eventually(check, seconds=10):
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "did not come true"
        time.sleep(0.01)
