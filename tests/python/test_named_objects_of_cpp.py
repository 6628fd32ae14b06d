"""A C++ worker that owns named objects is killed, and started again. What else the two languages do with names of each
other is in test_mixed_groups.py.
"""

import os
import subprocess

import pytest
from waiting import eventually

import torchrpc
import torchrpc.rpc as rpc
from torchrpc.testing import free_port, start_process

TIMEOUT_S = 60


def count(name, by):
    counter = torchrpc.lookup(name)
    return rpc.rpc_sync(counter.owner(), torchrpc.cpp_function("count"), args=(counter, by))


def lose_and_replace(worker, port):
    """Runs as rank 0."""

    def start():
        return subprocess.Popen([worker, "cpp", "1", "2", str(port)], env={**os.environ, "OMP_NUM_THREADS": "1"})

    cpp = start()
    try:
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=TIMEOUT_S, liveness_timeout=10
        )
        rpc.init_rpc("python", rank=0, world_size=2, rpc_backend_options=options)
        for name in ("first", "second"):
            rpc.rpc_sync("cpp", torchrpc.cpp_function("registerCounter"), args=(name,))
            assert count(name, 1) == 1
        cpp.kill()
        cpp.wait(TIMEOUT_S)
        for _ in range(2):
            with pytest.raises(rpc.WorkerLostError, match="'first' is lost with its owner cpp") as lost:
                torchrpc.lookup("first")
            assert lost.value.worker == "cpp"
        torchrpc.unregister("first")
        with pytest.raises(rpc.NameNotFoundError, match="'first'"):
            torchrpc.unregister("first")

        replaced = []
        torchrpc.on_member_change(lambda member, change: replaced.append(change) if change == "replaced" else None)
        cpp = start()
        eventually(lambda: bool(replaced), TIMEOUT_S)
        with pytest.raises(rpc.NameNotFoundError, match="'second'"):  # the new one has no objects of the old one
            torchrpc.lookup("second")
        rpc.rpc_sync("cpp", torchrpc.cpp_function("registerCounter"), args=("second",))
        assert count("second", 2) == 2
        rpc.shutdown()
        assert cpp.wait(TIMEOUT_S) == 0
    finally:
        cpp.kill()
        cpp.wait(TIMEOUT_S)


def test_names_of_a_killed_cpp_worker_are_free_and_one_that_is_started_again_takes_them(mixed_worker):
    process = start_process(lose_and_replace, mixed_worker, free_port())
    process.join(2 * TIMEOUT_S)
    process.kill()
    process.join()
    assert process.exitcode == 0
