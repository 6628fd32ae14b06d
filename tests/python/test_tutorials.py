"""The tutorials, small, as a user runs them on torchrpc."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"


def run_tutorial(name, *arguments, cwd):
    command = [sys.executable, "-m", "torchrpc", TUTORIALS / f"{name}.py", *arguments]
    run = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def assert_is_picture(path):
    assert path.read_bytes().startswith(b"\x89PNG")


def test_parameter_server_learns_the_digits(tmp_path):
    output = run_tutorial("parameter_server_push", "--workers=2", "--epochs=5", "--output=loss.png", cwd=tmp_path)
    start, end, accuracy = map(
        float, re.search(r"loss ([\d.]+) at the start, ([\d.]+) at the end .* accuracy ([\d.]+)%", output).groups()
    )
    assert end < start / 2
    assert accuracy > 80
    assert_is_picture(tmp_path / "loss.png")


def test_reinforcement_learning_learns_cartpole(tmp_path):
    # An untrained policy keeps the pole up for about 20 steps.
    output = run_tutorial("reinforcement_learning", "--target=60", "--episodes=400", "--output=curve.png", cwd=tmp_path)
    assert output.startswith("solved: ")
    assert_is_picture(tmp_path / "curve.png")


@pytest.mark.parametrize("path", sorted(TUTORIALS.glob("*.py")), ids=lambda path: path.stem)
def test_help_needs_no_group(path):
    run = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0
    assert "--output" in run.stdout
