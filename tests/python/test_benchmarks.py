"""Runs the comparison of benchmarks/compare as a user does, on few rows."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

COMPARE = Path(__file__).resolve().parents[2] / "benchmarks" / "compare"


@pytest.fixture
def compare(hook_path, tmp_path):
    def run(*arguments):
        command = [sys.executable, COMPARE, *arguments, "--wait-for-quiet=0", f"--output={tmp_path / 'out'}"]
        run = subprocess.run(command, env=hook_path, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    return run


@pytest.mark.timeout(600)
def test_rows_of_both_systems_stand_side_by_side(compare, tmp_path):
    output = compare("--quick", "--rows=nothing in or out|^init 2", "--transports=tcp")
    assert "| row " in output and "torchrpc / torch" in output
    assert "failed" not in output, output
    saved = json.loads((tmp_path / "out.json").read_text())
    assert set(saved["versions"]) >= {"torch", "torchrpc"}
    assert "torchrpc" in saved["versions"]["torchrpc"] and "torchrpc" not in saved["versions"]["torch"]
    rows = saved["results"]["tcp"]
    assert set(rows) == {"a Python function, nothing in or out", "init_rpc and shutdown, 2 workers"}
    for cells in rows.values():
        assert all(len(cells[label]) == 1 and cells[label][0] > 0 for label in ("torch", "torchrpc"))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert compare(f"--show={tmp_path / 'out.json'}") == output


@pytest.mark.timeout(400)
def test_a_failing_system_is_reported_and_the_others_continue(compare):
    # The processes of that column run on torch's RPC, which they refuse.
    selection = ("--quick", "--rows=nothing in or out", "--transports=tcp", "--systems=torchrpc")
    output = compare(*selection, "--also", "broken", "TORCHRPC_REPLACE=0")
    assert "| failed " in output
    assert "failed: a Python function, nothing in or out: broken: worker" in output
    assert re.search(r" [\d.]+ (µs|ms) +\| failed ", output)


def test_the_picture_of_the_site_shows_six_rows_of_the_present_tables(tmp_path):
    script, shown = COMPARE / "site_picture.py", COMPARE.parents[1] / "docs" / "benchmarks.png"
    subprocess.run([sys.executable, script, tmp_path / "new.png"], check=True, timeout=100)
    new, old = Image.open(tmp_path / "new.png"), Image.open(shown)
    assert old.text["Description"] == new.text["Description"], "run python benchmarks/compare/site_picture.py"
    assert old.text["Description"].count(";") == 5
    assert old.size == new.size and old.width == 800  # a site shows it 400 pixels wide


def test_every_row_is_named(compare):
    rows = compare("--list").splitlines()
    assert len(rows) == len(set(rows)) > 30
