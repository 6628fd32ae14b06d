"""Workers that take name, rank, size and meeting place from the launcher that has started them."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
from waiting import eventually

from torchrpc.testing import free_port

# Each worker calls the next one; worker 0 prints who took part.
SCRIPT = """
import logging
import torch
import torchrpc.rpc as rpc

logging.basicConfig(level=logging.INFO)
rpc.init_rpc()
me = rpc.get_worker_info()
size = len(rpc.api._get_current_rpc_agent().get_worker_infos())
total = rpc.rpc_sync(f"worker{(me.id + 1) % size}", torch.add, args=(torch.ones(2), me.id))
assert total.tolist() == [1 + me.id] * 2
rpc.shutdown()
print(f"{me.name} of {size} is done", flush=True)
"""
MPI_VARIABLES = ("PMI", "PMIX", "OMPI", "SLURM", "MASTER", "RANK", "WORLD_SIZE", "JOB_COMPLETION")


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def environment(hook_path):
    clean = {name: value for name, value in hook_path.items() if not name.startswith(MPI_VARIABLES)}
    return {**clean, "TORCHRPC_INIT_TIMEOUT": "60"}


def run_all(script, environments):
    """Run a worker with each of these environments; return what they print."""
    workers = [
        subprocess.Popen(
            [sys.executable, script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for environment in environments
    ]
    try:
        return [worker.communicate(timeout=100)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()


def test_open_mpis_variables(script, environment):
    job = f"prterun-{os.getpid()}"
    common = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": job}
    printed = run_all(script, [environment | common | {"OMPI_COMM_WORLD_RANK": str(rank)} for rank in range(2)])
    for rank in range(2):
        assert f"worker{rank} of 2 is done" in printed[rank]
        assert f"rank {rank} is from Open MPI" in printed[rank]


def test_kubernetes_variables(script, environment):
    common = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    printed = run_all(script, [environment | common | {"JOB_COMPLETION_INDEX": str(rank)} for rank in range(2)])
    for rank in range(2):
        assert f"worker{rank} of 2 is done" in printed[rank]


def test_what_is_missing_is_named(script, environment):
    nothing, mpi_only = run_all(script, [environment, environment | {"PMI_RANK": "0", "PMI_SIZE": "1"}])
    assert "environment variable RANK expected, but not set. Pass rank= to init_rpc, or use a launcher" in nothing
    assert "environment variable MASTER_ADDR expected, but not set" in mpi_only


def test_mpirun(script, environment):
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (Debian: openmpi-bin)")
    command = ["mpirun", "-n", "3", "--oversubscribe", sys.executable, str(script)]
    if os.geteuid() == 0:
        command.insert(1, "--allow-run-as-root")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    for rank in range(3):
        assert f"worker{rank} of 3 is done" in done.stdout, done.stdout + done.stderr
    assert "is from Open MPI" in done.stderr


# ---- Slurm ----

SLURM_CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
NodeName=node1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName=node2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture
def slurm(tmp_path):
    """A cluster of two nodes on this machine; the environment variables to use it."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "srun") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and Slurm (Debian: slurm-wlm, munge); not installed: {' '.join(missing) or 'nothing'}")
    tmp_path.chmod(0o755)
    key = tmp_path / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    (tmp_path / "state").mkdir()
    config = tmp_path / "slurm.conf"
    config.write_text(SLURM_CONF.format(folder=tmp_path, ports=[free_port() for _ in range(3)]))
    munge = [f"--{name}={tmp_path}/munge.{end}" for name, end in (("socket", "socket"), ("pid-file", "pid"))]
    munge += [f"--key-file={key}", f"--log-file={tmp_path}/munge.log", f"--seed-file={tmp_path}/munge.seed", "--force"]
    subprocess.run(["munged", *munge], check=True)
    subprocess.run(["slurmctld", "-f", config], check=True)
    for node in ("node1", "node2"):
        (tmp_path / f"spool.{node}").mkdir()
        subprocess.run(["slurmd", "-N", node, "-f", config], check=True)
    variables = {"SLURM_CONF": str(config)}
    try:
        sinfo = {"args": ["sinfo"], "env": os.environ | variables, "capture_output": True, "text": True}
        eventually(lambda: "idle" in subprocess.run(**sinfo).stdout)
        yield variables
    finally:
        for pid in tmp_path.glob("*.pid"):
            os.kill(int(pid.read_text()), signal.SIGTERM)


def test_slurm(script, environment, slurm):
    # Here the nodes' names are no host names, so the place to meet is given; on a cluster it need not be.
    variables = environment | slurm | {"MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        ["srun", "--nodes=2", "--ntasks=2", sys.executable, str(script)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=150,
    )
    for rank in range(2):
        assert f"worker{rank} of 2 is done" in done.stdout, done.stdout + done.stderr
    assert "is from Slurm" in done.stderr
