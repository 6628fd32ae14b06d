"""What a call costs, compared with the table that benchmarks/costs keeps."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COSTS = Path(__file__).resolve().parents[2] / "benchmarks" / "costs"
pytestmark = [
    pytest.mark.skipif(not (shutil.which("cc") and shutil.which("addr2line")), reason="needs cc: a C compiler"),
    pytest.mark.timeout(700),
    pytest.mark.skipif(sys.platform != "linux", reason="needs glibc"),
]


@pytest.fixture
def costs(hook_path):
    def run(*arguments):
        command = [sys.executable, COSTS, *map(str, arguments)]
        return subprocess.run(command, env=hook_path, capture_output=True, text=True, timeout=300)

    return run


@pytest.mark.alone("other programs change how often threads wait")
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_no_call_has_more_allocations_or_mutexes_than_the_kept_table_says(costs, transport):
    run = costs("--transports", transport, "--rounds", 2, "--calls", 100)
    if run.returncode == 1:  # on a busy machine threads wait more often; a row that has grown, has in every round
        run = costs("--transports", transport, "--rounds", 8, "--calls", 100)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_row_that_has_grown_is_named_with_what_to_do(costs, tmp_path):
    kept = json.loads((COSTS / "costs.json").read_text())
    kept["costs"]["shm"]["nothing"]["callee"]["largest_allocations"] -= 2
    (tmp_path / "costs.json").write_text(json.dumps(kept))
    selection = ("--transports=shm", "--rows=^(nothing|torch.add)$", "--rounds=3", "--calls=100")
    run = costs(*selection, "--table", tmp_path / "costs.json")
    assert run.returncode == 1, run.stdout + run.stderr
    assert "nothing in or out: allocations of the callee grew from" in run.stdout
    assert "--where allocations --side callee --transports shm --rows '^nothing$'" in run.stdout
    # The counts of mutexes depend on what else runs.
    assert len(re.findall(r": allocations of the \w+ grew from ", run.stdout)) == 1


def test_places_that_lock_mutexes_are_named(costs):
    run = costs("--where=mutexes", "--transports=tcp", "--rows=^nothing$", "--calls=100", "--depth=2")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "torchrpc::" in run.stdout
