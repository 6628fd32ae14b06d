"""Jobs with planted faults, and what the commands say about them within seconds: docs/standstill.md."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchrpc.observe import _why, attach
from torchrpc.testing import free_port

PROGRAMS = Path(__file__).with_name("planted_faults")
DOCS = PROGRAMS.parents[2] / "docs"
LIMIT_S = 60  # for a fault to come about
ANSWER_S = 20  # for a worker to answer on a busy machine, where the command is not repeated
PATIENT = ("--timeout", str(ANSWER_S))


@contextlib.contextmanager
def job(program, **variables):
    """Three processes that run a program; gives the processes and the address of their group."""
    address, port = "127.0.0.1", str(free_port())
    env = os.environ | {"MASTER_ADDR": address, "MASTER_PORT": port, "OMP_NUM_THREADS": "1"} | variables
    processes = [
        subprocess.Popen([sys.executable, PROGRAMS / program], env=env | {"RANK": str(rank)}) for rank in range(3)
    ]
    try:
        yield processes, f"{address}:{port}"
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait(30)


def torchrpc(*arguments):
    """Run `torchrpc ARGUMENTS` in the programs' folder; return its exit code, what it prints, and its seconds."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "torchrpc", *arguments], capture_output=True, text=True, timeout=LIMIT_S, cwd=PROGRAMS
    )
    return done.returncode, done.stdout or done.stderr, time.monotonic() - start


def until(command, is_shown):
    """Run a command until it shows the fault; return what it prints."""
    end = time.monotonic() + LIMIT_S
    while True:
        code, text, seconds = torchrpc(*command)
        if is_shown(code, text):
            return code, text, seconds
        assert time.monotonic() < end, f"{code}: {text}"


def line(program, text, which=0):
    """`FILE:LINE` of the first line of a program that has this text, or of a later one."""
    lines = (PROGRAMS / program).read_text().split("\n")
    return f"{program}:{[n for n, each in enumerate(lines, 1) if text in each][which]}"


def without_numbers(text):
    """The lines of a text, with times and numbers replaced: those of two runs differ."""
    return {re.sub(r"[\d.]+", "0", re.sub(r"\d[\d.]* (ms|s|min)\b", "TIME", each)).strip() for each in text.split("\n")}


@pytest.fixture(scope="module")
def deadlock():
    with job("deadlock.py") as found:
        yield found


@pytest.mark.parametrize("way", ["address", "pid"])
def test_a_deadlock_of_three_workers_is_named_with_its_lines(deadlock, way):
    processes, address = deadlock
    target = [address] if way == "address" else ["--pid", str(processes[2].pid)]
    _, text, _ = until(["why", *target], lambda code, text: code == 1)
    assert text.startswith("Deadlock: worker0, worker1 and worker2 wait for each other in a circle.")
    for rank in range(3):
        steps = [each for each in text.split("\n") if each.startswith(f"  worker{rank}  ")]
        assert len(steps) == 2
        assert any(line("deadlock.py", "pull))") in step and "waits for the reply of worker" in step for step in steps)
        assert any(
            re.search(rf"pull \({line('deadlock.py', 'with lock:')}\) waits for the lock `lock`", step)
            for step in steps
        )
        assert any(f"has taken at {line('deadlock.py', 'with lock:', 1)}" in step for step in steps)


def test_the_page_about_it_shows_what_the_command_prints(deadlock):
    _, address = deadlock
    _, text, _ = until(["why", address], lambda code, text: code == 1)
    assert not without_numbers(text) - without_numbers((DOCS / "standstill.md").read_text())


def test_a_deadlock_as_data(deadlock):
    _, address = deadlock
    _, text, _ = until(["why", address, "--json"], lambda code, text: code == 1)
    (finding,) = [each for each in json.loads(text)["findings"] if each["kind"] == "deadlock"]
    assert finding["workers"] == ["worker0", "worker1", "worker2"] and len(finding["steps"]) == 6


def test_the_stacks_of_a_deadlock(deadlock):
    _, address = deadlock
    until(["why", address], lambda code, text: code == 1)
    code, text, _ = torchrpc("stack", address, *PATIENT)
    assert code == 0 and text.count("  thread ") >= 6
    assert re.search(
        r"serves call \d+ \S+pull of worker\d since .*\n +waits for the lock `lock`, held by thread \d+", text
    )
    assert f"mix ({line('deadlock.py', 'pull))')})" in text


def test_the_group_of_this_machine_is_found_by_itself(deadlock, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    processes, _ = deadlock

    def is_found(code, text):
        """The group of another test may be shown instead until this one has started, and then both are named."""
        ours = {process.pid for process in processes}
        return "Several" in text or (code == 0 and {row["pid"] for row in json.loads(text)["workers"]} == ours)

    until(["top", "--once", "--json", "--every", "0.1"], is_found)


def test_a_function_that_keeps_the_gil_is_named_with_its_line():
    with job("straggler.py") as (_, address):
        code, text, _ = until(
            ["why", address], lambda code, text: "keeps the GIL" in text and "in the end" in text.lower()
        )
        place = re.escape(line("straggler.py", "re.match"))
        assert code == 3 and re.search(rf"^worker1: parse \({place}\) keeps the GIL \(for [\d.]+ s at least\)", text), (
            text
        )
        assert re.search(rf"in the end it is worker1 that runs.* in parse \({place}\)", text, re.I), text
        code, text, _ = torchrpc("stack", address, "--worker", "worker1", *PATIENT)
        assert code == 0 and "keeps the GIL; the stacks were read without it." in text
        assert re.search(rf"serves call \d+ \S+parse of worker0 since .*\n(.*\n)*? +parse \({place}\)", text), text


def test_a_busy_job_is_no_deadlock():
    with job("busy.py") as (_, address):
        until(["top", "--once", "--every", "0.1", address], lambda code, text: code == 0 and "3 workers" in text)
        with attach(address, timeout=ANSWER_S) as group:
            for _ in range(40):
                reports = group.reports(stacks=True, timeout=ANSWER_S)
                explanation = _why.explain(reports, [member.name for member in group.members])
                assert not explanation["has_cycle"], explanation
                assert not {"silent", "lost", "full_pool"} & {each["kind"] for each in explanation["findings"]}


def test_a_leak_of_a_thousand_rrefs_is_one_row():
    with job("leak.py", TORCHRPC_RREF_ORIGINS="1") as (_, address):
        _, text, _ = until(["rrefs", address, "--json"], lambda code, text: code == 0 and '"count": 1000' in text)
        (row,) = json.loads(text)["rrefs"]
        assert (row["owner"], row["holders"], row["made_by"], row["count"]) == ("worker1", ["worker0"], "worker0", 1000)
        assert row["made_at"] == f"{PROGRAMS}/{line('leak.py', 'rpc.remote')}"
        code, text, _ = torchrpc("rrefs", address, "--worker", "worker0", *PATIENT)
        assert code == 0 and "1,000 RRefs. Most of them: 1,000" in text and line("leak.py", "rpc.remote") in text
        code, text, _ = torchrpc("rrefs", address, "--older-than", "2h", *PATIENT)
        assert text == "No RRefs older than 2.0 h.\n"
