"""The tutorials with small arguments, as a user runs them on torchrpc."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchrpc.testing import free_port

# What a healthy run may write to standard error: progress bars ("[00:01<00:09", "| 00:01"), matplotlib's first use, and
# on a busy machine that a process starts ten seconds after another.
EXPECTED = re.compile(r"[\[|] ?\d\d:\d\d|font cache|has waited [\d.]+ s for the workers of rank .* to join")
TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"

pytestmark = pytest.mark.timeout(400)


def run_tutorial(name, *arguments, cwd, on=("-m", "torchrpc")):
    command = [sys.executable, *on, TUTORIALS / f"{name}.py", *arguments]
    env = {**os.environ, "MASTER_PORT": str(free_port())}  # the tutorial's own choice may be taken until it is used
    run = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stdout + run.stderr
    if on:  # torch's own RPC writes warnings
        noise = [line for line in re.split(r"[\r\n]+", run.stderr) if line.strip() and not EXPECTED.search(line)]
        assert not noise
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
    # The server applies the steps of all trainers: 0.1 from each of two diverges in some runs (2 of 8).
    options = [f"--trainers={trainers}", "--epochs=2", f"--lr={0.1 / trainers}", "--output=loss.png"]
    output = run_tutorial("parameter_server", *options, cwd=tmp_path)
    pattern = r"loss ([\d.]+) at the start, ([\d.]+) at the end; accuracy ([\d.]+)%"
    start, end, accuracy = map(float, re.search(pattern, output).groups())
    assert end < start / 2
    assert accuracy > 80
    assert_is_picture(tmp_path / "loss.png")


def test_the_loss_at_the_start_is_that_of_the_first_step_even_if_a_trainer_starts_late(tmp_path):
    late = f"""
import sys
sys.path.insert(0, {str(TUTORIALS)!r})
import parameter_server
options = parameter_server.parse_arguments(["--trainers=2"])
parameter_server.report({{"trainer_2": [2.3, 1.5, 0.6], "trainer_1": [0.7, 0.5]}}, 0.9, options)
"""
    run = subprocess.run(
        [sys.executable, "-m", "torchrpc", "-c", late], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert "loss 2.300 at the start" in run.stdout, run.stderr


def test_one_trainer_has_the_same_losses_as_on_torch(tmp_path):
    options = ["--images=192", "--epochs=1", "--seed=3"]
    run_tutorial("parameter_server", *options, "--losses=torch.json", cwd=tmp_path, on=())
    output = run_tutorial("parameter_server", *options, "--compare=torch.json", cwd=tmp_path)
    assert float(re.search(r"largest difference to torch.json: (\S+)", output)[1]) < 1e-4


def test_the_rnn_learns_its_text_and_reports_its_memory(tmp_path):
    output = run_tutorial("rnn", "--iterations=200", "--output=curves.png", cwd=tmp_path)
    start, end = map(float, re.search(r"loss ([\d.]+) at the start, ([\d.]+) at the end", output).groups())
    assert end < start / 2
    assert re.findall(r"(.*): resident \d+ KiB .* slope \S+ KiB per 1,000", output) == ["trainer", "parameter server"]
    assert_is_picture(tmp_path / "curves.png")


ACTORS = re.compile(r"(\w+), (a?synchronous): (\d+) updates by (\d+) gradients in .* accuracy ([\d.]+)%")


def test_actors_train_both_ways_and_synchronously_as_on_torch(tmp_path):
    options = ["--iterations=50", "--batch=32", "--lr=0.1"]
    run_tutorial("parameter_server_actors", *options, "--results=torch.json", cwd=tmp_path, on=())
    options += ["--results=ours.json", "--compare", "torch.json"]
    rows = ACTORS.findall(run_tutorial("parameter_server_actors", *options, cwd=tmp_path))
    assert [row[:4] for row in rows] == [
        (system, *counts)
        for system in ("torchrpc", "torch")
        for counts in (("synchronous", "50", "100"), ("asynchronous", "100", "100"))
    ]
    # Synchronous training is deterministic. Asynchronous training depends on the order of gradients, and its result
    # varies by twenty percent and more at this learning rate, so the best value counts.
    assert all(float(row[4]) > 85 for row in rows if row[1] == "synchronous"), rows
    theirs, ours = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("torch", "ours"))
    for curve in (theirs["torch, asynchronous"], ours["torchrpc, asynchronous"]):
        assert max(accuracy for *_, accuracy in curve) > 0.6, curve
    theirs, ours = theirs["torch, synchronous"], ours["torchrpc, synchronous"]
    assert [row[1:] for row in theirs] == [row[1:] for row in ours]
    assert_is_picture(tmp_path / "parameter_server_actors.png")


def test_shards_and_other_optimizers_train_without_waiting_for_slow_workers(tmp_path):
    slow = ["--workers=2", "--wait-for=1", "--slow=1"]
    options = ["--iterations=30", "--batch=32", "--servers=2", "--optimizer=Adam", "--lr=0.01", *slow]
    output = run_tutorial("parameter_server_actors", *options, cwd=tmp_path)
    seconds = re.search(r" synchronous: 30 updates by 30 gradients in ([\d.]+) s", output)[1]
    assert float(seconds) < 30 * 1.0  # the time of the slow worker alone
    assert float(ACTORS.search(output)[5]) > 60


WAYS = re.compile(r"([a-z ]+): \d+ answers/s, ([\d.]+) in a forward pass; .* accuracy ([\d.]+)%; (\d+) callers gave up")


def test_batching_answers_the_same_with_fewer_passes(tmp_path):
    output = run_tutorial("batching", "--callers=3", "--calls=20", "--size=256", "--training=40", cwd=tmp_path)
    ways = {way: row for way, *row in WAYS.findall(output)}
    assert list(ways) == ["one by one", "by hand", "batched"]
    assert len({accuracy for _, accuracy, _ in ways.values()}) == 1
    assert float(ways["one by one"][0]) == 1.0 and float(ways["by hand"][0]) == 6.0
    assert float(ways["batched"][0]) > 1.5
    assert_is_picture(tmp_path / "batching.png")


def test_an_absent_caller_stalls_batching_by_hand_only(tmp_path):
    options = ["--callers=3", "--calls=10", "--absent=1", "--timeout=5", "--size=256", "--training=5"]
    output = run_tutorial("batching", *options, cwd=tmp_path)
    assert {way: int(gave_up) for way, *_, gave_up in WAYS.findall(output)} == {
        "one by one": 0,
        "by hand": 5,
        "batched": 0,
    }


def test_a_pipeline_learns_the_same_in_parts(tmp_path):
    options = ["--parts", "1", "3", "--steps=40", "--batch=128", "--size=128", "--lr=0.2"]
    output = run_tutorial("pipeline", *options, cwd=tmp_path)
    rows = re.findall(
        r"part\(s\): .* ([\d.]+) at the start, ([\d.]+) at the end, at most (\S+) .* accuracy ([\d.]+)%", output
    )
    assert len(rows) == 2
    for start, end, difference, accuracy in rows:
        assert float(end) < float(start) / 2
        assert float(difference) < 1e-4
        assert float(accuracy) > 70
    assert_is_picture(tmp_path / "pipeline.png")


@pytest.mark.parametrize("on", [("-m", "torchrpc"), ()], ids=["torchrpc", "torch"])
def test_coroutines_search_and_stop_the_worse_trials(tmp_path, on):
    output = run_tutorial("asyncio_calls", "--trials=10", "--rounds=4", "--steps=20", cwd=tmp_path, on=on)
    pattern = r"accuracy ([\d.]+)% .* (\d+) rounds of 40; the loop was busy"
    accuracy, rounds = map(float, re.search(pattern, output).groups())
    assert accuracy > 70
    assert 10 <= rounds < 40
    assert_is_picture(tmp_path / "asyncio_calls.png")


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
