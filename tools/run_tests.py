#!/usr/bin/env python3
"""Runs the Python tests: most of them at the same time, then those that must run alone.

Usage: tools/run_tests.py [--jobs N] [PYTEST_ARGUMENT ...]

`--quick` leaves out the slow tests, `--slow` runs only these (tests/python/conftest.py). Either leaves out the tests of
names, documents and layers, which `make lint` runs. Tests wait for much of their time, so the default is two jobs for
each core.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_TESTS = 5  # pytest's exit status when it has selected none


def run(*arguments: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    print("+", *command[1:], flush=True)
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    return 0 if status == NO_TESTS else status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2 * (os.cpu_count() or 1), help="tests at the same time")
    arguments, others = parser.parse_known_args()
    at_once = ("-n", str(arguments.jobs), "--dist", "loadgroup", "--no-loadscope-reorder")
    kind = " and not lint" if {"--quick", "--slow"} & set(others) else ""
    return max(run(*at_once, "-m", f"not alone{kind}", *others), run("-m", f"alone{kind}", *others))


if __name__ == "__main__":
    sys.exit(main())
