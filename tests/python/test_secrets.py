"""What a group does against processes that are not given its secret: other users of the machine, and whoever can write
to the store. The attacks of these tests succeeded before the defence that each is about.
"""

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from outcomes import outcome_of
from waiting import eventually

import torchrpc.rpc as rpc
from torchrpc.testing import RankError, free_port, run_ranks

SECRET = "0123456789abcdef0123456789abcdef"
STRANGER = 65534  # "nobody"


def init(rank, url, world_size=2, name=None, **options):
    rpc.init_rpc(
        name or f"worker{rank}",
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=url, **options),
    )


# --- Strangers at the store of local workers ---


def member_or_stranger(rank, url, folder):
    """Rank 0 makes a group that grows; rank 1, another user, joins it and has it run a function."""
    done = Path(folder) / "done"
    if rank == 0:
        init(0, url, None)
        (Path(folder) / "ready").touch()
        eventually(done.exists)
        rpc.shutdown(graceful=False)
        return None
    eventually((Path(folder) / "ready").exists)
    os.setuid(STRANGER)

    def attack():
        init(1, url, None)
        return rpc.rpc_sync("worker0", os.getuid)

    try:
        return outcome_of(attack)
    finally:
        rpc._is_current_rpc_agent_set() and rpc.shutdown(graceful=False)
        done.touch()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_who_reaches_the_store_of_local_workers_cannot_join():
    url = f"tcp://localhost:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        _, text = run_ranks(member_or_stranger, 2, url, folder, init=False, start_method="fork")
    assert "RendezvousError" in text and "only their user may read" in text, text


def put_secret_first(rank, url, port):
    """Rank 0 of a group of local workers, to whose store a stranger has written a secret of its own before."""
    store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    dist.PrefixStore("rpc_prefix_0", store).set("secret", "a" * 64)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as under a launcher that serves the store
    return outcome_of(init, 0, url, 1)


def test_local_workers_take_no_secret_from_the_store():
    port = free_port()
    (text,) = run_ranks(put_secret_first, 1, f"tcp://localhost:{port}", port, init=False)
    assert "RendezvousError" in text and "everybody can read" in text, text


def add_to(rank, url, environment):
    os.environ.update(environment)
    init(rank, url)
    value = rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(torch.ones(1), 1)).item()
    rpc.shutdown()
    return value


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_local_workers_meet_however_they_were_started(start_method):
    url = f"tcp://127.0.0.1:{free_port()}"
    assert run_ranks(add_to, 2, url, {}, init=False, start_method=start_method) == [2.0, 2.0]


def test_local_workers_meet_if_nothing_is_common_to_their_environments(tmp_path):
    port = str(free_port())
    script = "import torch, torchrpc.rpc as rpc; rpc.init_rpc('w' + __import__('sys').argv[1]); rpc.shutdown()"
    children = []
    for rank in range(2):
        home = tmp_path / str(rank)
        home.mkdir()
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(sys.path),
            "HOME": str(home),
            "TMPDIR": str(home),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
        }
        children.append(subprocess.Popen([sys.executable, "-c", script, str(rank)], env=env, stderr=subprocess.PIPE))
    for child in children:
        _, errors = child.communicate(timeout=100)
        assert (child.returncode, errors) == (0, b"")


# --- What init_rpc says about a group without a secret ---


def say(rank, url, environment):
    os.environ.update(environment)
    init(rank, url, 1)
    rpc.shutdown()


@pytest.mark.parametrize(
    ("host", "environment", "words"),
    [
        (
            "localhost",
            {"TORCHRPC_LOG": "info"},
            "info: .* was given no secret: whoever runs as this user on this machine",
        ),
        ("localhost", {}, None),
        ("localhost", {"TORCHRPC_SECRET": SECRET, "TORCHRPC_LOG": "info"}, None),
    ],
)
def test_init_rpc_says_once_who_can_join(host, environment, words, capfd):
    run_ranks(say, 1, f"tcp://{host}:{free_port()}", environment, init=False, start_method="spawn")
    lines = [line for line in capfd.readouterr().err.splitlines() if "no secret" in line]
    assert len(lines) == (words is not None)
    if words:
        assert re.search(words, lines[0])


def address_of_this_machine():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("198.51.100.1", 9))
        return probe.getsockname()[0]
    return None


def test_a_group_that_other_machines_reach_without_a_secret_is_warned_about(capfd):
    if not (address := address_of_this_machine()) or address.startswith("127."):
        pytest.skip("this machine has no address that others reach")
    url = f"tcp://{address}:{free_port()}"
    assert run_ranks(add_to, 2, url, {}, init=False, start_method="spawn") == [2.0, 2.0]
    lines = [line for line in capfd.readouterr().err.splitlines() if "no secret" in line]
    assert len(lines) == 1, lines  # of rank 0 only
    assert "whoever reaches its store can join it and call its workers" in lines[0]
    assert "TORCHRPC_SECRET_FILE" in lines[0]


# --- Files that have a secret ---


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602])
def test_the_file_of_a_store_that_others_may_read_or_write_is_refused(tmp_path, mode):
    file = tmp_path / "store"
    file.touch()
    file.chmod(mode)
    with pytest.raises(ValueError, match=rf"others than its owner.*chmod 600 {file}.*TORCHRPC_SECRET"):
        init(0, f"file://{file}", 1)
    assert run_ranks(say, 1, f"file://{file}", {"TORCHRPC_SECRET": SECRET}, init=False) == [None]


def test_the_file_of_a_store_is_made_private(tmp_path):
    assert run_ranks(add_to, 2, f"file://{tmp_path}/store", {}, init=False) == [2.0, 2.0]
    init(0, f"file://{tmp_path}/other", 1)
    try:
        assert (tmp_path / "other").stat().st_mode & 0o777 == 0o600
    finally:
        rpc.shutdown()


def test_a_secret_file_that_is_a_fifo_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(RankError, match="no plain file"):
        run_ranks(say, 1, f"file://{tmp_path}/store", {"TORCHRPC_SECRET_FILE": str(tmp_path / "fifo")}, init=False)


# --- Records in the store ---


def rewrite_address(rank, url, folder):
    """Worker 0, or a relay that has only the store and rewrites the address of worker 1 before worker 0 reads it."""
    store_url, prefix = url, "rpc_prefix_0"
    if rank == 1:
        return outcome_of(init, 1, store_url)
    path = url.removeprefix("file://")
    store = dist.PrefixStore(prefix, dist.FileStore(path, -1))
    store.wait(["worker/1"])
    record = bytes(store.get("worker/1"))
    assert b"native:" in record
    store.set("worker/1", record.replace(b"native:", b"native;"))
    return outcome_of(init, 0, store_url)


def test_an_address_that_was_rewritten_in_the_store_is_refused_before_any_connection(tmp_path):
    env = {"TORCHRPC_SECRET": SECRET, "TORCHRPC_INIT_TIMEOUT": "40"}
    texts = run_ranks(rewrite_address, 2, f"file://{tmp_path}/store", str(tmp_path), init=False, env=env)
    for text in texts:
        assert "a record for worker 1" in text and "has changed it" in text, texts
