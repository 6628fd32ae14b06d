"""`torchrpc probe`: whether a worker answers, as Kubernetes asks."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from torchrpc import probe
from torchrpc.testing import free_port

WORKER = """
import sys
import torchrpc.rpc as rpc
rpc.init_rpc("worker0", rank=0, world_size=1)
print("serves", flush=True)
sys.stdin.read()
rpc.shutdown()
"""


@pytest.fixture(params=["secret", "plain"])
def worker(hook_path, request):
    """A worker and its port."""
    port, master_port = free_port(), free_port()
    secret = {"TORCHRPC_SECRET": "0123456789abcdef0123"} if request.param == "secret" else {}
    env = {**hook_path, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(master_port), "TORCHRPC_PORT": str(port)}
    with subprocess.Popen(
        [sys.executable, "-c", WORKER],
        env=env | secret,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "serves\n"
        yield process, port
        process.kill()


def probed(port, timeout_s=20):
    return probe.main(["--host=127.0.0.1", f"--port={port}", f"--timeout={timeout_s}"])


def test_a_worker_answers_and_logs_nothing(worker):
    process, port = worker
    for _ in range(300):  # more than the handshakes that may be pending
        assert probed(port) == 0
    _, errors = process.communicate("", timeout=60)
    assert process.returncode == 0
    assert not [line for line in errors.splitlines() if "no secret" not in line]


def test_a_stopped_worker_does_not_answer(worker):
    process, port = worker
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)  # until all of its threads are stopped
    assert probed(port, timeout_s=2) == 1
    process.send_signal(signal.SIGCONT)
    assert probed(port) == 0


def test_a_port_where_nobody_listens_or_another_program_does(capsys):
    begin = time.monotonic()
    assert probed(free_port(), timeout_s=2) == 1
    assert "no worker at 127.0.0.1" in capsys.readouterr().out
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert probed(other.getsockname()[1], timeout_s=2) == 1
    assert time.monotonic() - begin < 30


def test_a_range_of_ports_is_searched(worker):
    _, port = worker
    assert probed(f"{port - 1}-{port + 1}") == 0


def test_arguments_that_are_missing_or_wrong(capsys, monkeypatch):
    monkeypatch.delenv("TORCHRPC_PORT", raising=False)
    for arguments, text in (
        ([], "--port is missing"),
        (["--port=x"], "must be a port"),
        (["--port=0"], "must be a port"),
    ):
        with pytest.raises(SystemExit) as left:
            probe.main(arguments)
        assert left.value.code == 2
        assert text in capsys.readouterr().err


def test_the_command_takes_the_port_of_the_environment_and_loads_no_torch(worker, hook_path):
    _, port = worker
    command = [sys.executable, "-X", "importtime", "-m", "torchrpc", "probe", "--host=127.0.0.1", "--timeout=20"]
    env = {**hook_path, "TORCHRPC_PORT": str(port)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"127.0.0.1:{port} answers" in done.stdout
    assert " torch\n" not in done.stderr and "torchrpc._C" not in done.stderr
