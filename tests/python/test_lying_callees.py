"""A member of a group that answers a worker's calls with lies: ids, kinds, errors, counts, tensors, values, RRefs."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("noise", reason="needs noiseprotocol (pip install noiseprotocol)")

LYING_CALLEE = Path(__file__).resolve().parents[1] / "security" / "callee.py"
GROUPS = {"secret": "a secret alone", "identities": "identities", "tls": "TLS certificates"}
KINDS = 38  # at least, of lies that are told to each group
LIES = 42 * len(GROUPS)
NOT_WHOLE = {"partial frame", "records of encryption", "noise"}  # of these no value arrives
MANY = {"tcp": 5, "unix": 5}  # lies over each kind of connection, at least


def lie(hook_path, *arguments):
    command = [sys.executable, LYING_CALLEE, *map(str, arguments)]
    return subprocess.run(command, env=hook_path, capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def run(hook_path):
    """The output of one run, in which all groups use one server of processes."""
    groups = [group for group in GROUPS if group != "tls" or has_pyopenssl()]
    return lie(hook_path, "--lies", LIES // len(GROUPS) * len(groups), "--groups", *groups, "--quiet", 0.5)


def has_pyopenssl():
    try:
        import OpenSSL  # noqa: F401
    except ImportError:
        return False
    return True


def section(output, title):
    """The lines of one group."""
    return output.partition(f"a group with {title}, seed 0:\n")[2].partition("\na group with ")[0].splitlines()


def table(lines):
    """The rows, as dicts from column to number, by kind of lie."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[0]: {name: int(cell or 0) for name, cell in zip(rows[0][1:], row[1:], strict=True)} for row in rows[1:]}


@pytest.mark.alone("the latency of honest calls is compared with what it was before")
@pytest.mark.parametrize("group", GROUPS)
def test_a_lying_callee_neither_stops_nor_misleads_a_worker_and_leaves_nothing_behind(group, run):
    if group == "tls" and not has_pyopenssl():
        pytest.skip("needs pyopenssl (pip install pyopenssl)")
    lines = section(run.stdout, GROUPS[group])
    assert lines, run.stdout + run.stderr
    assert lines[-1].endswith("all holds"), "\n".join(lines)
    rows = table(lines)
    assert sum(row["sent"] for row in rows.values()) == LIES // len(GROUPS)
    assert len({kind.partition(":")[0] for kind in rows}) >= KINDS


@pytest.mark.alone("uses the run of the test before")
def test_the_lies_are_told_over_each_kind_of_connection(run):
    for title in GROUPS.values():
        if lines := section(run.stdout, title):
            rows = table(lines)
            for column, least in MANY.items():
                assert sum(row[column] for row in rows.values()) >= least, (title, column)
            assert "rings" not in lines[0] or sum(row["rings"] for row in rows.values()) >= MANY["unix"]


@pytest.mark.alone("uses the run of the test before")
def test_true_replies_are_believed_and_what_is_not_a_whole_reply_is_not(run):
    for title in GROUPS.values():
        if lines := section(run.stdout, title):
            rows = table(lines)
            true = rows["none: the true reply"]
            assert true["true answer"] == true["sent"] - true["not told"] > 0, title
            assert not any(rows[kind]["another value"] for kind in NOT_WHOLE if kind in rows), title
            assert sum(row["not told"] for row in rows.values()) <= 10, title


def test_memory_that_the_listener_can_shrink_is_refused(hook_path):
    run = lie(hook_path, "--lies", 1, "--groups", "secret", "--quiet", 0.1, "--kinds", "shared file that shrinks")
    assert run.returncode == 0, run.stdout + run.stderr
