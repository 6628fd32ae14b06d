"""Imported by each Python process that a measured test starts: notes what the process waits for.

Each event is one line of the file that TORCHRPC_TEST_EVENTS names: "start", "torch SECONDS" for the import of torch,
"sleep SECONDS". Lines are short and appended by one write, so that processes that are killed lose nothing.
"""

import importlib.abc
import importlib.util
import os
import sys
import time

_file = os.environ.get("TORCHRPC_TEST_EVENTS")


def note(event):
    try:
        descriptor = os.open(_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(descriptor, f"{event}\n".encode())
        os.close(descriptor)
    except OSError:
        pass  # a process without rights to the file, or without descriptors: it is not counted


class TorchTimer(importlib.abc.MetaPathFinder):
    """Finds the package torch as all other finders would, and measures how long its code takes."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        execute = spec.loader.exec_module

        def timed(module):
            start = time.monotonic()
            execute(module)
            note(f"torch {time.monotonic() - start:.3f}")

        spec.loader.exec_module = timed
        return spec


def sleep(seconds, original=time.sleep):
    note(f"sleep {seconds:.3f}")
    original(seconds)


sleep.__module__ = "time"  # tests send it to other processes, by its name


if _file:
    note("start")
    sys.meta_path.insert(0, TorchTimer())
    time.sleep = sleep
