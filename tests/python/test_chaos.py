"""Quick cases of tests/chaos.py; `python tests/chaos.py` runs all cases, with --scale 1 at full length."""

import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos_cases.harness import CASES, Settings, run_case

for part in ("death", "timeouts", "exits", "load", "unauthenticated_peers", "situations", "soak"):
    importlib.import_module(f"chaos_cases.{part}")

QUICK = [
    "killed in call",
    "stopped in to_here",
    "killed in backward",
    "stopped in optimizer step",
    "RRefs and contexts of a stopped worker are released",
    "shutdown with worker1 stopped",
    "shutdown with worker0, which serves the store and leads, killed",
    "shutdown with worker0, which serves the store and leads, stopped",
    "shutdown waits for a live worker's long job",
    "a killed worker is started again under its name",
    "remote(timeout=0.1) of a slow function, then to_here(), owner is the caller",
    "remote(timeout=0.1) of a slow function, then to_here(), owner is a peer",
    "remote(timeout=0.1) of a slow function, then shutdown",
    "propagate_deadlines: a nested call ends with its caller's deadline",
    "end with a call to itself outstanding",
    "end while a peer's call runs here",
    "Ctrl-C in future.wait()",
    "Ctrl-C in backward",
    "Ctrl-C in an optimizer's step",
    "Ctrl-C in shutdown() while a function runs here",
    "nested blocking calls, 64 deep, 4 threads",
    "num_worker_threads=512 before it is used",
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", QUICK)
def test_the_case_passes(name):
    [case] = [case for case in CASES if case.name == name]
    outcome = run_case(case, Settings(scale=0.001, patience=3))  # other tests run at the same time
    assert outcome.verdict == "pass", outcome.seen


def test_the_table_of_the_documentation_names_cases_that_exist():
    """And all of them, each once."""
    page = (Path(__file__).parents[2] / "docs" / "failure_cases.md").read_text()
    table = page[page.index("| case | torch") :].split("\n\n")[0].splitlines()[2:]
    assert sorted(row.split(" | ")[0].removeprefix("| ") for row in table) == sorted(case.name for case in CASES)
