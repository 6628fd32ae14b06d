"""Runs tests of simulated devices in a process of their own.

The process of the other tests must not have these devices: torch has only one accelerator in a process, and torch's
autograd engine starts a thread for each device when it is first used.

    @isolated.on_accelerator
    def test_addition():
        assert (torch.ones(2, device="sim") + 1).tolist() == [2, 2]

All such tests of a pytest process run in one child process, one after the other. A test that crashes or hangs ends the
child process; the next test starts a new one.
"""

import atexit
import functools
import importlib.util
import multiprocessing as mp
import sys
import traceback
from pathlib import Path

import pytest

from torchrpc.testing import start_process

sys.path.insert(0, str(Path(__file__).parent))
import sim

LIMIT_S = 100


def _serve(connection):
    """Run in the child process: call functions until the parent closes the connection."""
    sim.load()
    while True:
        try:
            path, name, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            module = sys.modules.get(Path(path).stem)  # loaded by an earlier test, or to unpickle an argument
            if getattr(module, "__file__", None) != path:
                spec = importlib.util.spec_from_file_location(Path(path).stem, path)
                module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
            sim.take_conflicts()
            getattr(module, name).__wrapped__(*args, **kwargs)
            for index in range(sim.device_count()):
                sim.synchronize(index)
            connection.send(None)
        except BaseException:
            connection.send(traceback.format_exc())


def run_in_new_process(function, *args):
    """Run a function in a process of its own, which loads the devices itself and may be a worker of any group."""
    skip_unless_built()
    process = start_process(function, *args)
    process.join(LIMIT_S)
    process.kill()
    assert process.exitcode == 0


class _Child:
    def __init__(self):
        self.process = None

    def call(self, *request):
        if self.process is None or not self.process.is_alive():
            self.connection, theirs = mp.Pipe()
            self.process = start_process(_serve, theirs)
            theirs.close()
            atexit.register(self.end)
        self.connection.send(request)
        try:
            if not self.connection.poll(LIMIT_S):
                pytest.fail(f"the test did not end within {LIMIT_S} s")
            return self.connection.recv()
        except BaseException as error:
            self.process.kill()
            self.process.join()
            self.connection.close()
            if isinstance(error, (EOFError, ConnectionError)):
                pytest.fail(f"the process of the test ended with the exit code {self.process.exitcode}")
            raise

    def end(self):
        """Let the child process end; multiprocessing would wait for it otherwise."""
        self.connection.close()
        self.process.join(10)
        self.process.kill()


_child = _Child()


def skip_unless_built():
    """Skip the test, with a hint how to build the simulated accelerator, if it is not built."""
    if sim.extension_path() is None:
        pytest.skip("the simulated accelerator is not built: cmake --build build/release")


def on_accelerator(function):
    """Make a test run in the process that has the simulated devices."""

    @functools.wraps(function)
    def test(*args, **kwargs):
        skip_unless_built()
        failure = _child.call(function.__code__.co_filename, function.__name__, args, kwargs)
        if failure:
            pytest.fail(failure, pytrace=False)

    return test
