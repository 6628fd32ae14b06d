"""Supervised objects: made again on another worker when their worker is killed."""

import os
import pickle
import threading

import pytest
from waiting import eventually

import torchrpc
import torchrpc.rpc as rpc
from torchrpc.testing import start_process

TIMEOUT_S = 60


class Service:
    def __init__(self, start=0, fail=False):
        if fail:
            raise OSError("no disk")
        self.count = start

    def add(self):
        self.count += 1
        return self.count

    def raise_it(self):
        raise rpc.WorkerLostError("of another worker", "worker9")

    def die(self):
        os._exit(1)

    def wait(self, seconds):
        threading.Event().wait(seconds)
        return self.count


def run(rank, folder, body):
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{folder}/store", rpc_timeout=TIMEOUT_S, liveness_timeout=10
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    if rank == 0:
        body()
        (folder / "end").touch()
    else:
        eventually((folder / "end").exists, TIMEOUT_S)
    rpc.shutdown(graceful=False)


def in_group(body, folder):
    """Run `body` on worker0, while worker1 and worker2 serve until they die."""
    workers = [start_process(run, rank, folder, body) for rank in range(3)]
    workers[0].join(2 * TIMEOUT_S)
    for worker in workers[1:]:
        worker.kill()
        worker.join()
    assert workers[0].exitcode == 0


def check_failing_calls():
    handle = torchrpc.supervise(Service, to=["worker1", "worker2"], kwargs={"start": 5}, name="service")
    assert [handle.rpc_sync().add(), handle.rpc_async().add().wait()] == [6, 7]
    with pytest.raises(rpc.WorkerLostError, match="of another worker"):
        handle.rpc_sync().raise_it()
    assert (handle.owner_name(), handle.restarts) == ("worker1", 0)
    waiting = [handle.rpc_async().wait(TIMEOUT_S) for _ in range(3)]
    with pytest.raises(rpc.WorkerLostError, match="worker1"):
        handle.rpc_sync().die()
    for future in waiting:
        with pytest.raises(rpc.WorkerLostError, match="worker1"):
            future.wait()
    assert handle.rpc_sync().add() == 6
    assert (handle.owner_name(), handle.restarts) == ("worker2", 1)
    assert torchrpc.lookup("service").rpc_sync().add() == 7
    with pytest.raises(TypeError, match="give it a name"):
        pickle.dumps(handle)


def test_calls_in_flight_fail_and_later_ones_reach_the_new_object(tmp_path):
    in_group(check_failing_calls, tmp_path)


def kill(name):
    os._exit(1)


def check_repeated_calls():
    handle = torchrpc.supervise(Service, to=["worker1", "worker2"], repeat_calls=True)
    waiting = [handle.rpc_async().wait(2) for _ in range(3)]
    with pytest.raises(rpc.WorkerLostError):
        rpc.rpc_sync("worker1", kill, args=("worker1",))
    assert handle.rpc_sync().add() == 1
    assert [future.wait() for future in waiting] == [1, 1, 1] or handle.restarts == 1
    assert (handle.owner_name(), handle.restarts) == ("worker2", 1)


def test_calls_are_repeated_on_the_new_object_if_they_may_be(tmp_path):
    in_group(check_repeated_calls, tmp_path)


def check_bounds():
    handle = torchrpc.supervise(Service, to=[1, 2], max_restarts=1)
    never = torchrpc.supervise(Service, to=["worker1", "worker2"], restart="never")
    assert never.rpc_sync().add() == 1
    with pytest.raises(rpc.WorkerLostError, match="worker1"):
        handle.rpc_sync().die()
    for _ in range(2):
        with pytest.raises(rpc.WorkerLostError, match="worker1"):
            never.rpc_sync().add()
    assert never.restarts == 0
    assert handle.rpc_sync().add() == 1
    for _ in range(2):
        with pytest.raises(rpc.WorkerLostError, match="worker2"):
            handle.rpc_sync().die()
    assert handle.restarts == 1


def test_an_object_is_made_again_as_often_as_it_may_be(tmp_path):
    in_group(check_bounds, tmp_path)


def check_arguments():
    for error, arguments, text in (
        (TypeError, {"factory": 1}, "factory must be callable"),
        (TypeError, {"to": []}, "of one at least"),
        (TypeError, {"to": "worker1"}, "list of workers"),
        (ValueError, {"restart": "always"}, "restart must be one of"),
        (ValueError, {"max_restarts": -1}, "max_restarts must be between 0 and 1000"),
        (rpc.RpcError, {"to": ["nobody"]}, "none of the workers"),
    ):
        with pytest.raises(error, match=text):
            torchrpc.supervise(**{"factory": Service, "to": ["worker1"], **arguments})
    handle = torchrpc.supervise(Service, to=["nobody", "worker2"], kwargs={"fail": True})
    with pytest.raises(OSError, match="no disk"):
        handle.rpc_sync().add()
    assert handle.restarts == 0


def test_bad_arguments_are_refused_and_exceptions_are_no_losses(tmp_path):
    in_group(check_arguments, tmp_path)


def test_supervision_needs_a_group():
    with pytest.raises(rpc.ShutdownError, match="not been initialized"):
        torchrpc.supervise(Service, to=["worker1"])
