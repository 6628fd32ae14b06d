"""Waiting, in tests, for what other threads and processes are about to do."""

import time


def eventually(check, seconds=10):
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "did not come true"
        time.sleep(0.01)
