"""The tutorials, small, as a user runs them on torchrpc."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"


def run_tutorial(name, *arguments, cwd, on=("-m", "torchrpc")):
    command = [sys.executable, *on, TUTORIALS / f"{name}.py", *arguments]
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


@pytest.mark.parametrize("trainers", [1, 2])
def test_trainers_share_a_model_on_a_parameter_server(tmp_path, trainers):
    options = [f"--trainers={trainers}", "--epochs=2", "--lr=0.1", "--output=loss.png"]
    output = run_tutorial("parameter_server", *options, cwd=tmp_path)
    pattern = r"loss ([\d.]+) at the start, ([\d.]+) at the end; accuracy ([\d.]+)%"
    start, end, accuracy = map(float, re.search(pattern, output).groups())
    assert end < start / 2
    assert accuracy > 80
    assert_is_picture(tmp_path / "loss.png")


def test_one_trainer_has_the_losses_that_it_has_on_torch(tmp_path):
    options = ["--images=192", "--epochs=1", "--seed=3"]
    run_tutorial("parameter_server", *options, "--losses=torch.json", cwd=tmp_path, on=())
    output = run_tutorial("parameter_server", *options, "--compare=torch.json", cwd=tmp_path)
    assert float(re.search(r"largest difference to torch.json: (\S+)", output)[1]) < 1e-4


def test_the_rnn_learns_its_text_and_tells_its_memory(tmp_path):
    output = run_tutorial("rnn", "--iterations=200", "--output=curves.png", cwd=tmp_path)
    start, end = map(float, re.search(r"loss ([\d.]+) at the start, ([\d.]+) at the end", output).groups())
    assert end < start / 2
    assert re.findall(r"(.*): resident \d+ KiB .* slope \S+ KiB per 1,000", output) == ["trainer", "parameter server"]
    assert_is_picture(tmp_path / "curves.png")


@pytest.mark.parametrize("path", sorted(TUTORIALS.glob("*.py")), ids=lambda path: path.stem)
def test_help_needs_no_group(path):
    run = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0
    assert "--output" in run.stdout


def test_the_rnn_s_profile_has_both_processes_and_can_be_drawn(tmp_path):
    run_tutorial("rnn", "--iterations=5", "--profile=trace.json", "--output=curves.png", cwd=tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "ps", 1: "trainer"}
    for pid, forward, backward in [(0, "aten::embedding", "EmbeddingBackward"), (1, "aten::lstm", "NllLossBackward")]:
        there = {event["name"] for event in events if event["pid"] == pid}
        assert forward in there
        assert any(backward in name for name in there)
    draw = TUTORIALS.parent / "tools" / "draw_trace.py"
    subprocess.run([sys.executable, draw, "trace.json", "trace.png"], cwd=tmp_path, check=True, timeout=60)
    assert_is_picture(tmp_path / "trace.png")
