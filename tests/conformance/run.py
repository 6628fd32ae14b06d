#!/usr/bin/env python3
"""Runs the RPC test suite that ships inside the torch wheel (torch.testing._internal.distributed) on torchrpc.

    run.py [-k REGEX] [-j N] [--timeout SECONDS] [--list]

Each test runs in a session of its own, which is killed at its end, and has `--timeout` seconds. It and its ranks are
forked from this process, which has imported all modules and started no thread. The tests in known_differences.txt
cannot pass and are not run. The exit status is 1 if a test fails.
"""

import argparse
import contextlib
import multiprocessing as mp
import multiprocessing.connection
import os
import re
import signal
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import NamedTuple

KNOWN = Path(__file__).with_name("known_differences.txt")
# Tests that fail under load, on torch's own RPC as well, since they measure short times. They run last, one at a time.
ALONE = {"RpcTest.test_set_and_get_default_rpc_timeout"}
# Tests that need torch's algorithm of backward passes: this one passes if backward() hangs on an unused remote result.
FAST_MODE = {"DistAutogradTest.test_backward_unused_send_function"}
SHOWN_LINES = 60  # the last lines of output that are printed for a failed test


class Test(NamedTuple):
    suite: str
    method: str
    faulty: bool  # on the backend FAULTY_TENSORPIPE

    def __str__(self):
        return f"{self.suite}.{self.method}"


def prepare(timeout, install=True):
    """Install torchrpc, if it is what is tested, and import the suites; return the module that lists them."""
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(int(timeout))  # after this time the ranks print their stacks
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start threads
    if install:
        import torchrpc

        torchrpc.install()
    from torch.testing._internal.distributed import rpc_utils

    def fork_ranks(self):
        with contextlib.suppress(RuntimeError):
            mp.set_start_method("spawn")  # what the code under test expects
        self._start_processes(mp.get_context("fork").Process)

    rpc_utils.SpawnHelper._spawn_processes = fork_ranks
    steady_process_groups()
    return rpc_utils


def steady_process_groups():
    """Avoid two hangs of the DDP suites, which occur on torch's own RPC, too.

    The masters call the trainers to make a process group as soon as their own init_process_group has returned, and wait
    for ever for a trainer whose own has not returned. And if DDP's reducer holds the last reference to a group, it
    joins gloo's threads with the GIL held, which these threads may wait for.
    """
    import torch.distributed as dist

    init_process_group = dist.init_process_group
    kept = []

    def init_then_meet(*args, **kwargs):
        init_process_group(*args, **kwargs)
        dist.barrier()
        kept.append(dist.group.WORLD)

    dist.init_process_group = init_then_meet


def collect(rpc_utils):
    """Yield all tests that need no GPU, in the order of the suites."""
    names = unittest.TestLoader().getTestCaseNames
    for suite in [*rpc_utils.GENERIC_TESTS, *rpc_utils.TENSORPIPE_TESTS, *rpc_utils.FAULTY_AGENT_TESTS]:
        for method in names(suite):
            yield Test(suite.__name__, method, suite in rpc_utils.FAULTY_AGENT_TESTS)


def known_differences():
    lines = (line.partition("#")[0].strip() for line in KNOWN.read_text().splitlines())
    return {line for line in lines if line}


def make_case(rpc_utils, test):
    """Return the test case. Runs in the test's process, since the faulty fixture registers a backend."""
    if test.faulty:
        from torch.testing._internal.distributed.rpc import faulty_rpc_agent_test_fixture as fixtures

        mixin = fixtures.FaultyRpcAgentTestFixture
    else:
        from torch.testing._internal.distributed.rpc import tensorpipe_rpc_agent_test_fixture as fixtures

        mixin = fixtures.TensorPipeRpcAgentTestFixture
    suite = getattr(rpc_utils, test.suite)
    made = rpc_utils.generate_tests("", mixin, [suite], __name__)
    globals().update(made)  # where pickle looks for it
    return made[test.suite](test.method)


def run_test(rpc_utils, test, log, verdict):
    """Be a test's process: run the test and send (status, text)."""
    os.setsid()
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    if str(test) in FAST_MODE:
        os.environ["TORCHRPC_BACKWARD_MODE"] = "fast"
    result = unittest.TestResult()
    make_case(rpc_utils, test).run(result)
    problems = [text for _, text in result.errors + result.failures]
    if problems or result.unexpectedSuccesses:
        verdict.send(("FAILED", "\n".join(problems)))
    elif result.skipped:
        verdict.send(("skipped", result.skipped[0][1]))
    else:
        verdict.send(("passed", ""))


class Running:
    """A test under way."""

    def __init__(self, rpc_utils, test, folder, limit):
        self.test, self.limit, self.start = test, limit, time.monotonic()
        self.log = os.path.join(folder, str(test))
        self.verdict, theirs = mp.Pipe(duplex=False)
        self.process = mp.get_context("fork").Process(target=run_test, args=(rpc_utils, test, self.log, theirs))
        self.process.start()
        theirs.close()

    def result(self):
        """Return None while it runs, else (status, text, seconds); its processes have ended then."""
        seconds = time.monotonic() - self.start
        status, text = "FAILED", "it did not end in time"
        if self.verdict.poll():
            try:
                status, text = self.verdict.recv()
            except EOFError:
                text = "it ended without a verdict"
        elif seconds < self.limit:
            return None
        self.kill()
        if status == "FAILED":
            text += "\n" + "\n".join(Path(self.log).read_text(errors="replace").splitlines()[-SHOWN_LINES:])
        return status, text, seconds

    def kill(self):
        """Kill it and its child processes."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it is no session leader yet, or has no processes left
            self.process.kill()
        self.process.join()


def run(rpc_utils, tests, jobs, limit):
    """Run the tests, `jobs` at once; return {status: tests}."""
    outcome = {"passed": [], "skipped": [], "FAILED": []}
    waiting, running = list(reversed(tests)), []
    with tempfile.TemporaryDirectory(prefix="torchrpc_conformance_") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder  # the folder of the suite's files
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(Running(rpc_utils, waiting.pop(), folder, limit))
                mp.connection.wait([each.verdict for each in running], timeout=1)
                for each in list(running):
                    if result := each.result():
                        running.remove(each)
                        status, text, seconds = result
                        outcome[status].append(each.test)
                        reason = f": {text}" if status == "skipped" else ""
                        print(f"{status:8} {seconds:5.1f} s  {each.test}{reason}", flush=True)
                        if status == "FAILED":
                            print(text, flush=True)
        finally:
            for each in running:
                each.kill()
            tempfile.tempdir = None
            del os.environ["TMPDIR"]
    return outcome


def require_one_thread():
    """End the program if it has threads: a test that is forked from it would not have them."""
    tasks = Path("/proc/self/task").iterdir()
    names = [(task / "comm").read_text().strip() for task in tasks if task.name != str(os.getpid())]
    if names:
        sys.exit(f"the imports have started threads ({', '.join(names)}): tests cannot be forked from here")


def main():
    parser = argparse.ArgumentParser(description="Run torch's own RPC test suite on torchrpc.")
    parser.add_argument("-k", metavar="REGEX", default="", help="only tests whose Suite.method it matches")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="tests at once (default 2)")
    parser.add_argument("--timeout", type=float, default=60, help="seconds a test (default 60)")
    parser.add_argument("--list", action="store_true", help="list the tests and exit")
    args = parser.parse_args()
    rpc_utils = prepare(args.timeout)
    everything = list(collect(rpc_utils))
    left_out = known_differences()
    if gone := left_out - {str(test) for test in everything}:
        sys.exit(f"{KNOWN.name} lists tests that do not exist: {', '.join(sorted(gone))}")
    tests = [test for test in everything if str(test) not in left_out and re.search(args.k, str(test))]
    if args.list:
        print("\n".join(map(str, tests)))
        return
    require_one_thread()
    limit = args.timeout + 20
    outcome = run(rpc_utils, [test for test in tests if str(test) not in ALONE], args.jobs, limit)
    for status, more in run(rpc_utils, [test for test in tests if str(test) in ALONE], 1, limit).items():
        outcome[status] += more
    numbers = ", ".join(f"{len(found)} {status}" for status, found in outcome.items())
    print(f"{numbers}; {len(left_out)} known differences")
    sys.exit(1 if outcome["FAILED"] else 0)


if __name__ == "__main__":
    main()
