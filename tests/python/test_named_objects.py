"""Named objects: found by any worker, and kept by their owner when the worker that registered them has died."""

import os
import signal
import threading
from pathlib import Path

import pytest
from waiting import eventually

import torchrpc
import torchrpc.rpc as rpc
from torchrpc.testing import free_port, run_ranks, start_process

TIMEOUT_S = 60


class Replay:
    def __init__(self):
        self.steps = []

    def add(self, step):
        self.steps.append(step)
        return len(self.steps)


def init(rank, size, folder, **options):
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{folder}/store", rpc_timeout=TIMEOUT_S, liveness_timeout=10, **options
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)


def run(rank, size, body, folder, options):
    init(rank, size, folder, **options)
    if rank == 0:
        body()
    rpc.shutdown()


def in_group(body, folder, size=3, **options):
    """Run `body` on worker0 while the others serve."""
    run_ranks(run, size, size, body, folder, options, start_method="forkserver", init=False)


def add_to_found(name, step):
    """Runs on a worker: adds to the object of that name."""
    return torchrpc.lookup(name).rpc_sync().add(step)


def check_everybody_finds_it():
    for owner in ("worker0", "worker1"):
        torchrpc.register(owner, rpc.remote(owner, Replay))
        assert torchrpc.lookup(owner).owner_name() == owner
        counts = [rpc.rpc_sync(f"worker{rank}", add_to_found, args=(owner, rank)) for rank in (0, 1, 2, 2)]
        assert counts == [1, 2, 3, 4]
        torchrpc.unregister(owner)
        with pytest.raises(rpc.NameNotFoundError, match=f"object named '{owner}'"):
            torchrpc.lookup(owner)
        with pytest.raises(rpc.NameNotFoundError, match=owner):
            rpc.rpc_sync("worker2", torchrpc.lookup, args=(owner,))  # which has found it before
        with pytest.raises(rpc.NameNotFoundError, match=owner):
            torchrpc.unregister(owner)


def test_every_worker_finds_an_object_by_its_name(tmp_path):
    in_group(check_everybody_finds_it, tmp_path)


def check_taken():
    torchrpc.register("replay", rpc.remote("worker1", Replay))
    for owner in ("worker0", "worker1", "worker2"):
        with pytest.raises(ValueError, match="name 'replay' belongs to an object of worker1"):
            torchrpc.register("replay", rpc.remote(owner, Replay))
    assert add_to_found("replay", 1) == 1
    torchrpc.unregister("replay")
    torchrpc.register("replay", rpc.RRef(Replay()))
    assert torchrpc.lookup("replay").owner_name() == "worker0"
    assert rpc.rpc_sync("worker1", add_to_found, args=("replay", 1)) == 1


def test_a_name_belongs_to_one_object(tmp_path):
    in_group(check_taken, tmp_path)


def register_here(name):
    """Runs on a worker: whether it got the name."""
    try:
        torchrpc.register(name, rpc.RRef(Replay()))
    except ValueError:
        return False
    return True


def check_race():
    for i in range(50):
        name = f"name {i}"
        futures = [rpc.rpc_async(f"worker{rank}", register_here, args=(name,)) for rank in (0, 1, 2)]
        assert sorted(future.wait() for future in futures) == [False, False, True]
        owners = {rpc.rpc_sync(f"worker{rank}", find_owner, args=(name,)) for rank in (0, 1, 2)}
        assert len(owners) == 1


def find_owner(name):
    return torchrpc.lookup(name).owner_name()


def test_of_workers_that_register_a_name_at_once_one_succeeds(tmp_path):
    in_group(check_race, tmp_path)


def check_bad_arguments():
    rref = rpc.RRef(1)
    for error, arguments, text in (
        (TypeError, (7, rref), "must be a str, but is a int"),
        (ValueError, ("", rref), "1 to 256 characters, but has 0"),
        (ValueError, ("x" * 257, rref), "but has 257"),
        (TypeError, ("name", 1), "rref must be an RRef, but is a int"),
    ):
        with pytest.raises(error, match=text):
            torchrpc.register(*arguments)
    with pytest.raises(TypeError, match="must be a str"):
        torchrpc.lookup(None)
    with pytest.raises(rpc.NameNotFoundError, match=r"'nothing'.*torchrpc\.register"):
        torchrpc.lookup("nothing")
    with pytest.raises(rpc.NameNotFoundError, match="'nothing'"):
        torchrpc.unregister("nothing")


def test_bad_arguments_are_refused_with_their_names(tmp_path):
    in_group(check_bad_arguments, tmp_path, size=1)


def check_allow_list():
    torchrpc.register("replay", rpc.remote("worker1", Replay))
    assert torchrpc.lookup("replay").rpc_sync().add(1) == 1
    torchrpc.unregister("replay")


def test_workers_with_an_allow_list_keep_named_objects(tmp_path):
    in_group(check_allow_list, tmp_path, size=2, allowed_functions=[Replay])


def test_names_need_a_group():
    for call in (lambda: torchrpc.lookup("x"), lambda: torchrpc.register("x", None), lambda: torchrpc.unregister("x")):
        with pytest.raises(rpc.ShutdownError, match="not been initialized"):
            call()


def lose_the_store(rank, folder, url):
    """Rank 0, whose process serves the store, is killed; the others still find what was registered."""
    folder = Path(folder)
    options = rpc.TensorPipeRpcBackendOptions(init_method=url, rpc_timeout=TIMEOUT_S, liveness_timeout=10)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    if rank == 0:
        torchrpc.register("replay", rpc.remote("worker1", Replay))
        assert rpc.rpc_sync("worker1", add_to_found, args=("replay", 1)) == 1
        (folder / "registered").touch()
        threading.Event().wait()
    eventually((folder / "dead").exists, TIMEOUT_S)
    if rank == 2:  # which has never asked for it
        assert add_to_found("replay", 2) == 2
        with pytest.raises(rpc.NameNotFoundError, match="'nothing'"):
            torchrpc.lookup("nothing")
        with pytest.raises(rpc.RpcError, match="group's store, which knows who owns the name 'new', is lost"):
            torchrpc.register("new", rpc.RRef(1))
        (folder / "end").touch()
    eventually((folder / "end").exists, TIMEOUT_S)
    rpc.shutdown(graceful=False)


def test_names_are_found_when_the_store_is_lost(tmp_path):
    url = f"tcp://127.0.0.1:{free_port()}"
    workers = [start_process(lose_the_store, rank, tmp_path, url) for rank in range(3)]
    eventually((tmp_path / "registered").exists, TIMEOUT_S)
    workers[0].kill()
    workers[0].join()
    (tmp_path / "dead").touch()
    for worker in workers[1:]:
        worker.join(TIMEOUT_S)
    assert [worker.exitcode for worker in workers[1:]] == [0, 0]


def live_or_die(rank, folder):
    """Rank 2 registers an object of worker1, and one of its own, and is killed; then worker1 is."""
    folder = Path(folder)
    init(rank, 4, folder)
    if rank == 2:
        torchrpc.register("replay", rpc.remote("worker1", Replay))
        torchrpc.register("mine", rpc.RRef(Replay()))
        (folder / "registered").touch()
        threading.Event().wait()
    elif rank == 1:
        threading.Event().wait()
    eventually((folder / "dead2").exists, TIMEOUT_S)
    expected = 1 if rank == 0 else 2
    if rank == 3:
        eventually((folder / "added").exists, TIMEOUT_S)
    assert add_to_found("replay", rank) == expected
    with pytest.raises(rpc.WorkerLostError, match="'mine' is lost with its owner worker2"):
        torchrpc.lookup("mine")
    (folder / ("added" if rank == 0 else "added too")).touch()
    if rank == 0:
        eventually((folder / "added too").exists, TIMEOUT_S)
        os.kill(rpc.rpc_sync("worker1", os.getpid), signal.SIGKILL)
        with pytest.raises(rpc.WorkerLostError, match="'replay' is lost with its owner worker1"):
            torchrpc.lookup("replay")
        torchrpc.register("replay", rpc.RRef(Replay()))  # the name is free again
        assert add_to_found("replay", 0) == 1
        (folder / "again").touch()
    else:
        eventually((folder / "again").exists, TIMEOUT_S)
        assert find_owner("replay") == "worker0"
        (folder / "end").touch()
    eventually((folder / "end").exists, TIMEOUT_S)
    rpc.shutdown(graceful=False)


def test_an_object_outlives_the_worker_that_registered_it(tmp_path):
    workers = [start_process(live_or_die, rank, tmp_path) for rank in range(4)]
    eventually((tmp_path / "registered").exists, TIMEOUT_S)
    workers[2].kill()
    workers[2].join()
    (tmp_path / "dead2").touch()
    for rank in (0, 3):
        workers[rank].join(TIMEOUT_S)
    workers[1].kill()
    workers[1].join()
    assert [workers[rank].exitcode for rank in (0, 3)] == [0, 0]
