"""A client of a group that lies on the wire: names, ids, roles, counts, lengths, order."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("noise", reason="needs noiseprotocol (pip install noiseprotocol)")

SECURITY = Path(__file__).resolve().parents[1] / "security"


def lie(hook_path, *arguments):
    command = [sys.executable, SECURITY, *map(str, arguments)]
    return subprocess.run(command, env=hook_path, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(("group", "groups"), [("identities", 3), ("secret", 2), ("tls", 3)])
def test_lies_change_no_name_fail_no_honest_call_and_leave_nothing_behind(group, groups, hook_path):
    if group == "tls":
        pytest.importorskip("OpenSSL", reason="needs pyopenssl (pip install pyopenssl)")
    run = lie(hook_path, "--lies", 300, "--groups", group)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("all holds") == groups
    rows = [row.split(" | ") for row in run.stdout.splitlines() if row.startswith("| ") and not row.startswith("| lie")]
    assert sum(int(row[1]) for row in rows) == 300
    outcomes = {row[0].removeprefix("| "): row[2:] for row in rows[: len(rows) // groups]}
    closed, answered, ignored = 0, 2, 3
    for name in ("name of a living worker", "id of a living worker", "name and id of a living worker"):
        assert outcomes[name][closed] and not outcomes[name][answered] and not outcomes[name][ignored]
    for name in ("another worker has joined", "nobody has joined", "role"):
        assert not outcomes[name][answered]
