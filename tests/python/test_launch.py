"""`torchrpc.launch`: what a launcher says, and the store for launchers of one's own."""

import socket
import sys

import pytest
from member_processes import LIMIT_S, WorkerProcess, leave
from test_launchers import MPI_VARIABLES
from test_replaced_members import gather, pids_of_all

from torchrpc import launch


@pytest.fixture
def no_launcher(monkeypatch):
    import os

    for name in [name for name in os.environ if name.startswith((*MPI_VARIABLES, "KUBERNETES"))]:
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        ({"RANK": "2", "WORLD_SIZE": "4"}, ("RANK in the environment", 2, 4)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}, ("Slurm", 1, 3)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, ("Open MPI", 1, 2)),
        ({"JOB_COMPLETION_INDEX": "5", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}, ("Kubernetes", 5, None)),
    ],
)
def test_a_launcher_is_found(no_launcher, variables, found):
    for name, value in variables.items():
        no_launcher.setenv(name, value)
    assert launch.find_launch() == found


def test_a_variable_that_is_no_number_is_named(no_launcher):
    no_launcher.setenv("RANK", "first")
    with pytest.raises(RuntimeError, match="RANK must be a number, but is 'first'"):
        launch.find_launch()


def join_by_environment():
    import os

    import torchrpc.rpc as rpc

    rpc.init_rpc()
    return os.getpid()


def test_any_worker_of_a_store_server_s_group_can_be_started_again():
    started = []

    def start(rank):
        variables = {**server.environment(rank, 3), "TORCHRPC_INIT_TIMEOUT": str(LIMIT_S)}
        started.append(WorkerProcess(variables))
        started[-1].begin(join_by_environment)
        return started[-1]

    with launch.StoreServer() as server:
        try:
            workers = [start(rank) for rank in range(3)]
            assert [worker.result() for worker in workers] == [worker.pid for worker in workers]
            for rank in (0, 2):
                workers[rank].kill()
                workers[rank] = start(rank)
                workers[rank].result()
            pids = [worker.pid for worker in workers]
            for worker in workers:
                assert worker.run(pids_of_all) == pids
            for worker in workers:
                worker.begin(gather, 1)
            assert [len(worker.result()) for worker in workers] == [3] * 3
            for worker in workers:
                worker.begin(leave)
            for worker in workers:
                worker.result()
        finally:
            for worker in started:
                worker.kill()


def test_a_store_server_listens_at_its_address_only_until_it_is_closed():
    server = launch.StoreServer("127.0.0.2")
    socket.create_connection(("127.0.0.2", server.port), 10).close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", server.port), 10)
    server.close()
    server.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", server.port), 10)
    with pytest.raises(ValueError, match="rank must be from 0 to 1, as world_size is 2, but is 2"):
        server.environment(2, 2)


def test_the_extra_for_ray_is_named_where_ray_is_missing(monkeypatch):
    from torchrpc.launch import ray

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"needs Ray: pip install 'torchrpc\[ray\]'"):
        ray.start(print, 2)
    with pytest.raises(ValueError, match="world_size must be at least 1, but is 0"):
        ray.start(print, 0)
