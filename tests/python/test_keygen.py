"""`torchrpc keygen`: keys of groups and identities of workers."""

import os
import subprocess
import sys

import pytest


def keygen(*arguments, cwd):
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "torchrpc",
            "keygen",
            *(each if isinstance(each, bytes) else str(each) for each in arguments),
        ],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_group_key_and_identities_are_made_for_their_owner_alone(tmp_path):
    made = keygen("group.key", "--member", "trainer-0", "trainer-1", "--client", "client-7", "--days", 90, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    files = {"group.key", "trainer-0.identity", "trainer-1.identity", "client-7.identity"}
    assert {path.name for path in tmp_path.iterdir()} == files
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    parts = {
        name: dict(line.split(": ") for line in (tmp_path / name).read_text().splitlines() if not line.startswith("#"))
        for name in files
    }
    assert parts["group.key"].keys() == {"secret", "signing key"}
    assert parts["client-7.identity"].keys() == {"secret", "group", "certificate", "private key"}
    assert len({parts[name]["secret"] for name in files}) == 1
    assert len({parts[name]["private key"] for name in files - {"group.key"}}) == 3
    assert "client-7 (client)" in (tmp_path / "client-7.identity").read_text()


def test_a_key_that_exists_makes_further_identities_and_nothing_is_overwritten(tmp_path):
    assert keygen("group.key", "--member", "a", cwd=tmp_path).returncode == 0
    key, identity = (tmp_path / "group.key").read_text(), (tmp_path / "a.identity").read_text()
    assert keygen("group.key", "--member", "b", cwd=tmp_path).returncode == 0
    assert (tmp_path / "group.key").read_text() == key
    again = keygen("group.key", "--member", "a", cwd=tmp_path)
    assert again.returncode != 0
    assert "a.identity exists already: keygen overwrites nothing" in again.stderr
    assert (tmp_path / "a.identity").read_text() == identity


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["group.key", "--member", "a/../b"], "cannot have the name 'a/../b'"),
        (["group.key", "--member", "a", "--days", "0"], "an identity must be valid for some time"),
        (["other.key", "--member", "a"], "not of the form 'name: base64'"),
        (["missing/group.key"], "cannot be written: No such file or directory"),
        (["."], "cannot be read"),
        (["fifo.key", "--member", "a"], "is no plain file"),
        (["open.key", "--member", "a"], "may be read or written by others than its owner: run chmod 600"),
        *((["group.key", "--member", "a", "--days", days], "--days is") for days in ("1e20", "inf", "nan")),
        (["group.key", "--member", b"a\xff"], "cannot have the name 'a\\udcff'"),
    ],
)
def test_a_wrong_argument_is_named(arguments, words, tmp_path):
    (tmp_path / "other.key").write_text("nonsense")
    (tmp_path / "other.key").chmod(0o600)
    (tmp_path / "open.key").write_text("nonsense")
    (tmp_path / "open.key").chmod(0o644)
    os.mkfifo(tmp_path / "fifo.key", 0o600)
    failed = keygen(*arguments, cwd=tmp_path)
    assert failed.returncode != 0
    assert words in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not list(tmp_path.glob("**/*.identity"))
