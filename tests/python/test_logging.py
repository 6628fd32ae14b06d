"""What torchrpc writes: nothing in a healthy run, a line for what a user should know, each of one line."""

import logging
import os
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch

import torchrpc
import torchrpc.rpc as rpc
from torchrpc import _C
from torchrpc.rpc import _logging
from torchrpc.testing import free_port, run_ranks, workers

PROGRAM = """
    import torch
    import torch.multiprocessing as mp
    import torchrpc.rpc as rpc
    from torchrpc import autograd as dist_autograd

    def run(rank):
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
        if rank == 0:
            with dist_autograd.context() as context:
                x = torch.ones(2, requires_grad=True)
                loss = rpc.rpc_sync("worker1", torch.mul, args=(x, 2)).sum()
                dist_autograd.backward(context, [loss])
            rref = rpc.remote("worker2", torch.ones, args=([3],))
            print(rref.to_here())
        rpc.shutdown()

    if __name__ == "__main__":
        mp.start_processes(run, nprocs=3, start_method="fork")  # one that comes ten seconds later is news
"""


def run(tmp_path, monkeypatch, text, **variables):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=True)
    return done.stderr.splitlines()


def test_a_healthy_run_writes_nothing(tmp_path, monkeypatch):
    assert run(tmp_path, monkeypatch, PROGRAM) == []


def test_at_the_level_info_each_worker_says_who_it_is(tmp_path, monkeypatch):
    lines = run(tmp_path, monkeypatch, PROGRAM, TORCHRPC_LOG="info")
    who_can_join = [line for line in lines if "was given no secret: whoever" in line]
    assert len(who_can_join) == 3
    assert sorted(set(lines) - set(who_can_join)) == [
        f"torchrpc info: worker{rank} is rank {rank} of 3 workers; native(shm,tcp)" for rank in range(3)
    ]


def test_a_level_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("TORCHRPC_LOG", "loud")
    with pytest.raises(ValueError, match="TORCHRPC_LOG must be one of debug, info, warning, error, but is 'loud'"):
        _logging.configure()


def test_lines_of_the_core_have_a_level_and_no_place_in_the_code(tmp_path, monkeypatch):
    text = """
        import torchrpc.rpc as rpc
        options = rpc.TensorPipeRpcBackendOptions(transport="tensorpipe", _transports=["ibv", "uv"])
        rpc.init_rpc("w", rank=0, world_size=1, rpc_backend_options=options)
        rpc.shutdown()
    """
    [line] = run(tmp_path, monkeypatch, text)
    assert line.startswith("torchrpc warning: ignores transports that cannot be used here: ibv")
    assert run(tmp_path, monkeypatch, text, TORCHRPC_LOG="error") == []


def kept_records():
    """Return a list that receives the records of torchrpc."""
    handler = logging.Handler()
    handler.records = []
    handler.emit = handler.records.append
    logging.getLogger("torchrpc").addHandler(handler)
    return handler.records


def init_with_a_transport_that_is_not_there(rank):
    records = kept_records()
    options = rpc.TensorPipeRpcBackendOptions(transport="tensorpipe", _transports=["ibv", "uv"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=1, rpc_backend_options=options)
    rpc.shutdown()
    _C._end_log()  # all lines are records now
    return [(record.name, record.levelname, record.getMessage()) for record in records if "ibv" in record.getMessage()]


def test_lines_of_the_core_are_records_of_python_s_logging(capfd):
    [[(name, level, text)]] = run_ranks(init_with_a_transport_that_is_not_there, 1, init=False)
    assert (name, level) == ("torchrpc.core", "WARNING")
    assert text.startswith("ignores transports that cannot be used here: ibv")
    assert "ibv" not in capfd.readouterr().err


def log_after_the_end(rank):
    records = kept_records()
    _C._end_log()
    options = rpc.TensorPipeRpcBackendOptions(transport="tensorpipe", _transports=["ibv", "uv"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=1, rpc_backend_options=options)
    rpc.shutdown()
    return [record.getMessage() for record in records if "ibv" in record.getMessage()]


def test_lines_after_the_end_of_the_interpreter_s_log_go_to_standard_error(capfd):
    assert run_ranks(log_after_the_end, 1, init=False, start_method="spawn") == [[]]
    assert "torchrpc warning: ignores transports that cannot be used here: ibv" in capfd.readouterr().err


def growing(rank):
    records = kept_records()
    rpc.init_rpc(f"worker{rank}", rank=rank)
    rpc.shutdown()
    return [(record.name, record.levelname, record.getMessage()) for record in records]


def test_a_group_that_grows_says_so_when_it_begins():
    [[(name, level, text)]] = run_ranks(growing, 1, init=False)
    assert (name, level) == ("torchrpc.rpc._group.init", "WARNING")
    assert "worker0 (rank 0) has begun a group that grows, because it was given no world_size" in text
    assert "pass world_size=" in text


def init_from_environment(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    rpc.init_rpc(f"worker{rank}")
    count = len(rpc.get_worker_infos())
    if rank == 0:
        assert rpc.rpc_sync("worker1", torch.add, args=(1, 1)) == 2
    rpc.shutdown()
    return count


def test_rank_and_size_come_from_the_environment():
    assert run_ranks(init_from_environment, 2, init=False) == [2, 2]


RAISES = """
    import torchrpc
    import torchrpc.rpc as rpc

    def fail():
        raise ValueError("it is broken")

    def through(to):
        return rpc.rpc_sync(to, fail)

    if __name__ == "__main__":
        with torchrpc.local_group(3) as group:
            rpc.rpc_sync(group.names[1], FIRST)
"""


@pytest.mark.parametrize("first", ["fail", "through, args=(group.names[2],)"])
def test_the_traceback_of_a_failure_is_once_on_the_screen_of_a_group(tmp_path, monkeypatch, first):
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run(tmp_path, monkeypatch, RAISES.replace("FIRST", first))
    assert failed.value.stderr.count('raise ValueError("it is broken")') == 1, failed.value.stderr


def fail():
    raise ValueError("it is broken")


def fail_by(to):
    return rpc.rpc_sync(to, fail)


async def fail_in_a_coroutine():
    fail()


@rpc.functions.async_execution
def fail_in_a_callback(me):
    return rpc.rpc_async(me, torch.add, args=(1, 1)).then(lambda _: fail())


@torchrpc.batched(max_batch=3, timeout=60)
def fail_together(_):
    fail()


def fail_with(text):
    raise ValueError(text)


kept = []


def fail_with_a_kept_exception():
    kept.append(ValueError("it is broken"))
    raise kept[-1]


def state_of_the_kept_exception():
    (exc,) = kept
    names = [name for name in dir(exc) if "torchrpc" in name]
    return names, dict(vars(exc)), type(vars(pickle.loads(pickle.dumps(exc)))) is dict


class FailsToBeMade:
    def __init__(self):
        fail()


def log_failures_here():
    global failures
    failures = kept_records()


def take_failures():
    format_record = logging.Formatter("%(worker)s %(peer)s %(name)s %(levelname)s %(function)s: %(message)s").format
    taken = [format_record(record) for record in failures]
    failures.clear()
    return taken


def use_a_failed_rref_twice():
    rref = rpc.remote("worker1", FailsToBeMade)
    with pytest.raises(ValueError, match="it is broken"):
        rref.to_here()
    rref.rpc_sync().anything()


def make_a_batch_fail():
    torch.futures.wait_all([rpc.rpc_async("worker1", fail_together, args=(n,)) for n in range(3)])


def test_a_failure_of_a_called_function_is_one_record_of_its_worker():
    def failures_of(make):
        with pytest.raises((ValueError, rpc.RemoteException), match="it is broken"):  # the latter of a callback
            make()
        return [rpc.rpc_sync(name, take_failures) for name in ("worker1", "worker2")]

    with workers(3):
        for name in ("worker1", "worker2"):
            rpc.rpc_sync(name, log_failures_here)
        [[text], others] = failures_of(lambda: rpc.rpc_sync("worker1", fail))
        assert others == [] and text.startswith(
            "worker1 worker0 torchrpc.calls ERROR fail: worker1 has run fail for worker0, which raised "
            "ValueError('it is broken')\nTraceback"
        )
        assert text.count('raise ValueError("it is broken")') == 1
        [others, [text]] = failures_of(lambda: rpc.rpc_sync("worker1", fail_by, args=("worker2",)))
        assert others == [] and text.startswith("worker2 worker1 torchrpc.calls ERROR fail: ")
        for make in (
            use_a_failed_rref_twice,
            make_a_batch_fail,
            lambda: rpc.rpc_sync("worker1", fail_in_a_coroutine),
            lambda: rpc.rpc_sync("worker1", fail_in_a_callback, args=("worker1",)),
            lambda: rpc.rpc_sync("worker1", fail_with_a_kept_exception),
        ):
            [[text], others] = failures_of(make)
            assert others == [] and text.startswith("worker1 ")
        forged = "it is broken\n2026-01-01 root ERROR forged\x1b[31m"
        [[text], _] = failures_of(lambda: rpc.rpc_sync("worker1", fail_with, args=(forged,)))
        assert "forged" in text and not any(line.startswith("2026") for line in text.splitlines())
        assert text.replace("\n", "").isprintable()
        assert rpc.rpc_sync("worker1", state_of_the_kept_exception) == ([], {}, True)
