"""The tutorial on parameter servers under real launchers, with one kill, to the end.

docs/launchers.md promises what these tests show. Each is skipped by name where its launcher is not installed.
"""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from network_hosts import REASON, Hosts
from test_launchers import environment, slurm  # noqa: F401 - fixtures
from waiting import eventually

TUTORIAL = Path(__file__).resolve().parents[2] / "tutorials" / "parameter_server.py"
OPTIONS = ["--epochs=4", "--images=800", "--lr=0.05", "--checkpoint=server.pt", "--losses=losses.json"]
STEPS = 100
LIMIT_S = 160  # for each of the two halves of a test; half a minute for both where nothing else runs

pytestmark = pytest.mark.timeout(2 * LIMIT_S + 40)
AGAIN = 'for attempt in 1 2 3; do "$@" && exit 0; sleep 1; done; exit 1'  # as on the page


def step_of_checkpoint(folder):
    with contextlib.suppress(FileNotFoundError):
        return torch.load(folder / "server.pt")["step"]
    return -1


def wait_until_it_trains(folder):
    eventually(lambda: step_of_checkpoint(folder) >= 25, LIMIT_S)


def processes_in(folder):
    """{pid: environment} of the tutorial's processes with that working directory."""
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (each / "cwd").resolve() == folder.resolve() and b"parameter_server.py" in (
                each / "cmdline"
            ).read_bytes():
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
    assert float(found[2]) > 75, printed
    assert step_of_checkpoint(folder) == STEPS
    # Each step has a loss, but those that died with a process, and those that ran again from a checkpoint.
    assert STEPS - 40 <= sum(map(len, json.loads((folder / "losses.json").read_text()).values())) <= STEPS + 2


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


def output_in(folder):
    # Processes that write at once may cut each other's characters in two.
    return (folder / "output").read_text(errors="replace")


def printed_by(launcher, folder, seconds=LIMIT_S):
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(seconds)
    text = output_in(folder)
    assert launcher.returncode == 0, text
    return text


# --- launchers that start processes and leave it to the command to start them again ---


def test_mpirun(tmp_path, environment):  # noqa: F811
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (Debian: openmpi-bin)")
    command = ["mpirun", "-n", "3", "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    command += ["bash", "-c", AGAIN, "again", sys.executable, "-m", "torchrpc", TUTORIAL, *OPTIONS]
    with started(command, tmp_path, environment) as launcher:
        wait_until_it_trains(tmp_path)
        kill_rank(tmp_path, "OMPI_COMM_WORLD_RANK", 2)
        printed = printed_by(launcher, tmp_path)
    expect_learned(tmp_path, printed)
    assert "the server goes on" not in printed  # it has not noticed much


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


# --- Ray, which starts an actor again ---

RAY_DRIVER = Path(__file__).with_name("ray_driver.py")


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (pip install ray)")
def test_ray_starts_a_killed_trainer_again_and_the_server_on_another_node(tmp_path, environment):  # noqa: F811
    options = [re.sub("=(?=server.pt|losses.json)", f"={tmp_path}/", option) for option in OPTIONS]
    path = os.pathsep.join([str(TUTORIAL.parent), environment["PYTHONPATH"]])
    # Ray gives its workers a low priority, with which they would wait for whatever else this machine runs.
    variables = {"PYTHONPATH": path, "HOME": str(tmp_path), "RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, RAY_DRIVER, str(tmp_path), *options, f"--output={tmp_path}/loss.png", "--patience=90"]
    with started(command, tmp_path, environment | variables) as launcher:
        wait_until_it_trains(tmp_path)
        printed = printed_by(launcher, tmp_path)
    assert "all have returned" in printed
    expect_learned(tmp_path, printed)
    assert "the server goes on at step" in printed


# --- torchrun on several hosts, which starts all workers again ---

SERVE = "from torchrpc.launch import StoreServer; import signal; server = StoreServer('{}', 29400); signal.pause()"


@contextlib.contextmanager
def agents(folder, nproc, *options):
    """Two hosts, each with an agent of torchrun that starts `nproc` workers, and a third one where agents meet."""
    with Hosts(3) as hosts, (folder / "output").open("w") as output:
        hosts.start(2, "-c", SERVE.format(hosts.address(2)))
        meet = f"--rdzv-endpoint={hosts.address(2)}:29400"
        # The defaults of torchrun notice a lost agent after 15 s, and wait 30 s for others.
        conf = "--rdzv-conf=is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
        command = ["-m", "torch.distributed.run", "--nnodes=1:2", f"--nproc-per-node={nproc}", "--max-restarts=3"]
        command += ["--rdzv-backend=c10d", meet, "--rdzv-id=job", conf]
        variables = {"TORCHRPC_REPLACE": "1", "TORCHRPC_LIVENESS_TIMEOUT": "4", "PYTHONUNBUFFERED": "1"}
        for number in range(2):
            address = f"--local-addr={hosts.address(number)}"
            options_of_popen = {"cwd": folder, "stdout": output, "stderr": subprocess.STDOUT}
            hosts.start(number, *command, address, TUTORIAL, *OPTIONS, *options, env=variables, **options_of_popen)
        yield hosts


def has_learned(folder):
    return " at the end; accuracy " in output_in(folder)


def host_of(hosts, folder, rank):
    """The number of the host on which the worker of that rank runs."""
    (pid,) = (pid for pid, variables in processes_in(folder).items() if variables.get("RANK") == str(rank))
    pids = [subprocess.check_output(["ip", "netns", "pids", name], text=True).split() for name in hosts.names]
    return next(number for number, found in enumerate(pids) if str(pid) in found)


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_torchrun_starts_all_hosts_again_after_the_kill_of_a_worker(tmp_path):
    with agents(tmp_path, 1) as hosts:
        wait_until_it_trains(tmp_path)
        kill_rank(tmp_path, "RANK", 1)
        printed = [printed_by(agent, tmp_path) for agent in hosts.processes[1:]][-1]
    expect_learned(tmp_path, printed)
    assert "the server goes on at step" in printed


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_workers_of_a_killed_agent_of_torchrun_finish_their_work(tmp_path):
    with agents(tmp_path, 1) as hosts:
        wait_until_it_trains(tmp_path)
        hosts.processes[1 + host_of(hosts, tmp_path, 1)].kill()
        eventually(lambda: has_learned(tmp_path), LIMIT_S)
        # The other agent waits five minutes for the killed one; that wait is not part of this test.
    expect_learned(tmp_path, output_in(tmp_path))


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_torchrun_goes_on_without_the_host_of_rank_0(tmp_path):
    with agents(tmp_path, 2, "--patience=8") as hosts:
        wait_until_it_trains(tmp_path)
        first = host_of(hosts, tmp_path, 0)
        hosts.connect(first, "down")  # no connection is closed: the others notice silence
        hosts.kill_all(first)
        printed = printed_by(hosts.processes[1 + (1 - first)], tmp_path)
    expect_learned(tmp_path, printed)
    assert "the server goes on at step" in printed
