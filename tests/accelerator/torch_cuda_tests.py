#!/usr/bin/env python3
"""Runs the CUDA tests of torch's RPC test suite on simulated devices or GPUs, with torchrpc or with torch's own RPC.

    torch_cuda_tests.py [--device {sim,cuda}] [--rpc {torchrpc,torch}] [-k REGEX] [-j N] [--timeout SECONDS] [--list]

The tests are those inside the torch wheel (torch.testing._internal.distributed). Their modules are compiled from a
source in which the device "cuda" is "sim" and torch.cuda is torch.sim. Each test runs in the same way as those of
tests/conformance/run.py. At the end the program prints a table of all tests; the exit status is 1 if a test failed.
"""

import argparse
import importlib.machinery
import os
import re
import subprocess
import sys
import unittest
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "conformance")]

SUITES = re.compile(r"torch\.testing\._internal\.(distributed\.(rpc|nn)\..*|distributed\.ddp_under_dist_autograd_test)")
SUBSTITUTIONS = [
    (r"\btorch\.cuda\b", "torch.sim"),
    (r"(['\"])cuda(?=['\"])", r"\1sim"),
    (r"\bcuda(?=:[0-9{])", "sim"),
    (r"\.is_cuda\b", ".is_sim"),
    (r"(?<!remote_module)\.cuda\(", ".sim("),
    ("CUDA error: invalid device ordinal", "invalid device ordinal"),
    # Kernels run on the CPU: with smaller numbers they take a while, not minutes.
    (r"\b2048\b", "128"),
    (r"\b20000\b", "1250"),
    (r"\b200, 1, 28, 28\b", "20, 1, 28, 28"),
    (r"\b10 \* FIFTY_MIL_CYCLES\b", "2 * FIFTY_MIL_CYCLES"),
]
CYCLES_PER_MS = 1e6  # sim._sleep() counts nanoseconds


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from its source after the substitutions, which keep the line numbers."""

    def get_code(self, fullname):
        source = self.get_source(fullname)
        for pattern, replacement in SUBSTITUTIONS:
            source = re.sub(pattern, replacement, source)
        return compile(source, self.get_filename(fullname), "exec", dont_inherit=True)


class Finder:
    """Finds the modules of the suites, for Loader."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if not SUITES.fullmatch(name):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


def substitute_devices():
    """Load the simulated devices, and make the suites use them as GPUs."""
    import sim
    import torch

    sim.load()
    torch.cuda.Event = torch.Event  # torch skips objects of this class when it looks for tensors
    from torch.testing._internal import common_distributed, common_utils

    common_utils.get_cycles_per_ms = lambda: CYCLES_PER_MS

    def skip_if_lt_x_gpu(count, **_):
        return unittest.skipIf(sim.device_count() < count, f"needs {count} devices")

    common_distributed.skip_if_lt_x_gpu = skip_if_lt_x_gpu
    sys.meta_path.insert(0, Finder)


def count_devices_in_a_child():
    """Let torch know the number of GPUs without CUDA: its driver starts a thread, and no child could use it."""
    import torch

    code = "import torch; print(torch.cuda.device_count())"
    count = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    torch.cuda.is_available = lambda: count > 0
    torch.cuda.device_count = lambda: count
    sys.modules["numba"] = None  # it asks the driver itself


def collect(run, rpc_utils):
    names = unittest.TestLoader().getTestCaseNames
    for suite in [*rpc_utils.GENERIC_CUDA_TESTS, *rpc_utils.TENSORPIPE_CUDA_TESTS]:
        for method in names(suite):
            yield run.Test(suite.__name__, method, False)


def main():
    parser = argparse.ArgumentParser(description="Run torch's CUDA tests of RPC on simulated devices.")
    parser.add_argument("--device", choices=["sim", "cuda"], default="sim", help="sim: simulated; cuda: GPUs")
    parser.add_argument("--rpc", choices=["torchrpc", "torch"], default="torchrpc", help="what is tested")
    parser.add_argument("-k", metavar="REGEX", default="", help="only tests whose Suite.method it matches")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="tests at once (default 2)")
    parser.add_argument("--timeout", type=float, default=60, help="seconds a test (default 60)")
    parser.add_argument("--list", action="store_true", help="list the tests and exit")
    args = parser.parse_args()

    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy would start threads
    # Some tests rely on the time that streams take: one sleeps for a second, and another does not wait for it.
    os.environ.setdefault("SIM_STRICT", "0")
    if args.rpc == "torch":
        os.environ["TORCHRPC_REPLACE"] = "0"
    import run

    if args.device == "sim":
        substitute_devices()
    else:
        count_devices_in_a_child()
    rpc_utils = run.prepare(args.timeout, install=args.rpc == "torchrpc")
    tests = [test for test in collect(run, rpc_utils) if re.search(args.k, str(test))]
    if args.list:
        print("\n".join(map(str, tests)))
        return
    run.require_one_thread()
    outcome = run.run(rpc_utils, tests, args.jobs, args.timeout + 20)
    status_of = {test: status for status, found in outcome.items() for test in found}
    print(f"\n| test, on {args.rpc} | |\n|-|-|")
    for test in tests:
        print(f"| {test} | {status_of[test]} |")
    print(", ".join(f"{len(found)} {status}" for status, found in outcome.items()))
    sys.exit(1 if outcome["FAILED"] else 0)


if __name__ == "__main__":
    main()
