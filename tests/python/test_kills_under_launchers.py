"""The tutorial on parameter servers under real launchers, with one kill, to the end.

docs/launchers.md promises what these tests show. Each is skipped by name where its launcher is not installed.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from network_hosts import REASON, Hosts
from test_launchers import environment, slurm  # noqa: F401 - fixtures
from waiting import eventually

from torchrpc.testing import free_port

TUTORIAL = Path(__file__).resolve().parents[2] / "tutorials" / "parameter_server.py"
OPTIONS = ["--epochs=3", "--lr=0.05", "--checkpoint=server.pt", "--losses=losses.json"]  # 141 steps
AGAIN = 'for attempt in 1 2 3; do "$@" && exit 0; sleep 1; done; exit 1'  # as on the page


def step_of_checkpoint(folder):
    with contextlib.suppress(FileNotFoundError):
        return torch.load(folder / "server.pt")["step"]
    return -1


def wait_until_it_trains(folder):
    eventually(lambda: step_of_checkpoint(folder) >= 25, 80)


def processes_in(folder):
    """{pid: environment} of the tutorial's processes with that working directory."""
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (each / "cwd").resolve() == folder.resolve() and b"parameter_server.py" in (each / "cmdline").read_bytes():
                pairs = (text.partition("=") for text in (each / "environ").read_text().split("\0"))
                found[int(each.name)] = {name: value for name, _, value in pairs}
    return found


def kill_rank(folder, variable, rank):
    """Kill the process in which the variable has this value, and which is Python: not its shell, nor its launcher."""
    (pid,) = (
        pid
        for pid, variables in processes_in(folder).items()
        if variables.get(variable) == str(rank) and "python" in Path(f"/proc/{pid}/exe").resolve().name
    )
    os.kill(pid, signal.SIGKILL)


def expect_learned(folder, printed):
    found = re.search(r"loss ([\d.]+) at the start, [\d.]+ at the end; accuracy ([\d.]+)%", printed)
    assert found, printed
    assert float(found[1]) > 2
    assert float(found[2]) > 80, printed
    assert step_of_checkpoint(folder) == 141
    # Each step has a loss, but those that died with a process, and those that ran again from a checkpoint.
    assert 141 - 40 <= sum(map(len, json.loads((folder / "losses.json").read_text()).values())) <= 141 + 2


@contextlib.contextmanager
def started(command, folder, variables):
    """The launcher, with its output in a file; whatever it has started in the folder is killed in the end."""
    variables = {**variables, "TORCHRPC_INIT_TIMEOUT": "60", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with (folder / "output").open("w") as output:
        launcher = subprocess.Popen(command, cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield launcher
    finally:
        launcher.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(5)
        launcher.kill()
        for pid in processes_in(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def printed_by(launcher, folder, seconds=80):
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(seconds)
    text = (folder / "output").read_text()
    assert launcher.returncode == 0, text
    return text


# --- launchers that start processes and leave it to the command to start them again ---


@pytest.mark.parametrize(("rank", "says"), [(0, "waits for parameter_server"), (2, "")], ids=["server", "trainer"])
def test_mpirun(tmp_path, environment, rank, says):  # noqa: F811
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (Debian: openmpi-bin)")
    command = ["mpirun", "-n", "3", "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    command += ["bash", "-c", AGAIN, "again", sys.executable, "-m", "torchrpc", TUTORIAL, *OPTIONS]
    with started(command, tmp_path, environment) as launcher:
        wait_until_it_trains(tmp_path)
        kill_rank(tmp_path, "OMPI_COMM_WORLD_RANK", rank)
        printed = printed_by(launcher, tmp_path)
    expect_learned(tmp_path, printed)
    assert says in printed
    assert ("the server goes on at step" in printed) == (rank == 0)


def test_slurm(tmp_path, environment, slurm):  # noqa: F811
    # The nodes' names are no host names here, so the place to meet is given; on a cluster it need not be.
    variables = environment | slurm | {"MASTER_ADDR": "127.0.0.1"}
    folder = tmp_path / "job"
    folder.mkdir()
    command = ["srun", "--nodes=2", "--ntasks=3", "--overcommit", "--kill-on-bad-exit=0"]
    command += ["bash", "-c", AGAIN, "again", sys.executable, "-m", "torchrpc", TUTORIAL, *OPTIONS]
    with started(command, folder, variables) as launcher:
        wait_until_it_trains(folder)
        kill_rank(folder, "SLURM_PROCID", 0)
        printed = printed_by(launcher, folder)
    expect_learned(folder, printed)
    assert "waits for parameter_server" in printed
    assert "the server goes on at step" in printed


# --- torchrun, which starts all workers again ---


def torchrun(*options):
    return ["-m", "torch.distributed.run", "--max-restarts=3", "--rdzv-backend=c10d", *options, TUTORIAL, *OPTIONS]


def test_torchrun_starts_all_again(tmp_path, environment):  # noqa: F811
    variables = {**environment, "TORCHRPC_REPLACE": "1"}
    options = ["--nproc-per-node=3", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    with started([sys.executable, *torchrun(*options)], tmp_path, variables) as launcher:
        wait_until_it_trains(tmp_path)
        kill_rank(tmp_path, "RANK", 1)
        printed = printed_by(launcher, tmp_path)
    expect_learned(tmp_path, printed)
    assert "the server goes on at step" in printed
