"""A pytest plugin that measures where the time of each test goes; tools/test_times.py runs it.

A line of JSON for each test goes to the file that TORCHRPC_TEST_TIMES names. "seconds" is setup, call and teardown. A
sampling thread looks at the stack of the main thread every 20 ms while it waits and counts what it waits for.
"""

import json
import os
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

INTERVAL_S = 0.02
# The innermost frame that matches names what the test waits for: part of a path, function (empty: any), name.
WAITS = [
    ("torchrpc/rpc/_group/init.py", "", "forming a group"),
    ("torchrpc/rpc/_group/rendezvous.py", "", "forming a group"),
    ("torchrpc/rpc/_group/shutdown.py", "", "shutdown"),
    ("torchrpc/_processes.py", "results", "child processes"),
    ("torchrpc/_processes.py", "__exit__", "child processes"),
    ("torchrpc/_processes.py", "start", "child processes"),
    ("/subprocess.py", "", "child processes"),
    ("/multiprocessing/", "", "child processes"),
    ("torchrpc/", "", "calls"),
    ("tests/python/waiting.py", "", "conditions"),
]


class Account:
    """The processor time of this process and of all processes that it starts, those included that it does not wait for.

    A control group counts it, if this process may make one; else the processes that were waited for are counted.
    """

    def __init__(self):
        self.usage = None
        try:
            group = Path("/sys/fs/cgroup/cpuacct") / f"torchrpc_tests_{os.getpid()}"
            group.mkdir()
            (group / "cgroup.procs").write_text(str(os.getpid()))
            self.usage = group / "cpuacct.usage"
        except OSError:
            pass

    def seconds(self):
        if self.usage is not None:
            return int(self.usage.read_text()) * 1e-9
        usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Sampler(threading.Thread):
    """Counts, by what the main thread waits for, the seconds in which it used no processor."""

    def __init__(self):
        super().__init__(name="test_times", daemon=True)
        self.main_thread = threading.main_thread().ident
        self.waits = {}

    def run(self):
        clock = time.pthread_getcpuclockid(self.main_thread)
        used = time.clock_gettime(clock)
        while True:
            time.sleep(INTERVAL_S)
            before, used = used, time.clock_gettime(clock)
            if used - before < INTERVAL_S / 2:
                name = self.wait_of(sys._current_frames().get(self.main_thread))
                self.waits[name] = self.waits.get(name, 0) + INTERVAL_S

    def wait_of(self, frame):
        while frame is not None:
            path = frame.f_code.co_filename
            for part, function, name in WAITS:
                if part in path and function in ("", frame.f_code.co_name):
                    return name
            frame = frame.f_back
        return "other"


class Measurement:
    def __init__(self, output):
        self.output = output
        self.sampler = Sampler()
        self.sampler.start()
        folder = tempfile.mkdtemp(prefix="test_times")
        self.events = Path(folder) / "events"
        os.environ["TORCHRPC_TEST_EVENTS"] = str(self.events)
        here = str(Path(__file__).parent)
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.slept = 0.0
        self.account = Account()
        original_sleep = time.sleep

        def sleep(seconds):
            if threading.get_ident() == self.sampler.main_thread:
                self.slept += seconds
            original_sleep(seconds)

        sleep.__module__, sleep.__qualname__ = "time", "sleep"  # tests send it to other processes, by its name
        time.sleep = sleep

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.events.write_text("")
        self.sampler.waits, self.slept = {}, 0.0
        start, cpu = time.monotonic(), self.account.seconds()
        try:
            return (yield)
        finally:
            marker = item.get_closest_marker("xdist_group")
            group = (
                f"@{marker.args[0]}" if marker else ""
            )  # xdist adds it to the ids of tests that it gives out by group
            events = [line.split() for line in self.events.read_text().splitlines()]
            result = {
                "id": item.nodeid.removesuffix(group),
                "seconds": round(time.monotonic() - start, 3),
                "cpu": round(self.account.seconds() - cpu, 3),
                "starts": sum(event[0] == "start" for event in events),
                "torch": round(sum(float(event[1]) for event in events if event[0] == "torch"), 3),
                "slept": round(self.slept, 3),
                "slept in children": round(sum(float(event[1]) for event in events if event[0] == "sleep"), 3),
                "waits": {name: round(seconds, 2) for name, seconds in self.sampler.waits.items()},
            }
            with open(self.output, "a") as file:
                file.write(json.dumps(result) + "\n")


def pytest_configure(config):
    output = os.environ.get("TORCHRPC_TEST_TIMES")
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if output and runs_tests:
        config.pluginmanager.register(Measurement(output))
