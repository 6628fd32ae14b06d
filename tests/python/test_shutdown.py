"""How groups end, and that the next group starts afresh."""

import asyncio
import concurrent.futures
import functools
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from waiting import eventually

import torchrpc
import torchrpc.autograd
import torchrpc.rpc as rpc
from torchrpc.rpc._group import gather
from torchrpc.rpc._group import shutdown as ending
from torchrpc.testing import RankError, free_port, run_ranks, workers

DONE = []


def note(value):
    time.sleep(0.05)  # so that the worker serves it when the others shut down
    DONE.append(value)


def join(rank, world_size, method, **options):
    rpc.init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=method, **options),
    )


def work_until_the_end(rank):
    """Every worker calls shutdown at once; calls under way must still be served."""
    futures = [rpc.rpc_async(f"worker{(rank + 1) % 3}", note, (i,)) for i in range(5)]
    rpc.shutdown()
    return len(DONE), [f.done() for f in futures]


def run_and_leave(rank, fn):
    method = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
    join(rank, 3, method)
    return fn(rank)


def test_shutdown_waits_for_the_work_of_all_workers():
    results = run_ranks(run_and_leave, 3, work_until_the_end, start_method="forkserver", init=False)
    assert results == [(5, [True] * 5)] * 3


def init_again(rank):
    port = os.environ["MASTER_PORT"]
    values = []
    for _ in range(3):
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)  # by env://, with the same port each time
        values.append(rpc.rpc_sync(f"worker{1 - rank}", int, (port,)))
        rpc.shutdown()
        with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
            rpc.rpc_sync("worker0", len, ("x",))
    return values


def test_groups_follow_one_another_on_one_port():
    first, second = run_ranks(init_again, 2, start_method="forkserver", init=False)
    assert first == second and len(set(first)) == 1


def share_the_port(rank):
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=rank, world_size=2)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    value = rpc.rpc_sync(f"worker{1 - rank}", rpc.get_worker_info)
    dist.barrier()
    rpc.shutdown()
    dist.barrier()
    dist.destroy_process_group()
    return value.name


def test_the_port_can_be_shared_with_a_process_group():
    assert run_ranks(share_the_port, 2, start_method="forkserver", init=False) == ["worker1", "worker0"]


def test_a_process_may_join_different_groups_one_after_another():
    for size in (2, 3, 2):
        with workers(size) as names:
            assert [rpc.rpc_sync(name, rpc.get_worker_info).name for name in names] == names


def gather_at_once(rank):
    """Worker 0 calls while init_rpc has not returned on worker 1."""
    if rank:
        mark_formed = rpc.api.mark_formed
        rpc.api.mark_formed = lambda store: (time.sleep(0.5), mark_formed(store))  # worker 0 calls meanwhile
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        other = rpc.rpc_async("worker1", rpc.api._all_gather, (1,))
        assert rpc.api._all_gather(0, timeout=20) == other.wait() == {"worker0": 0, "worker1": 1}
    rpc.shutdown()


def test_all_gather_can_be_called_on_a_worker_that_still_begins():
    run_ranks(gather_at_once, 2, start_method="forkserver", init=False)


def one_does_not_come(rank):
    if rank == 0:
        with pytest.raises(RuntimeError, match="timed out in _all_gather"):
            rpc.shutdown(timeout=0.3)
        assert not rpc._is_current_rpc_agent_set()
        Path(os.environ["GAVE_UP"]).touch()
        return "gave up"
    eventually(lambda: os.path.exists(os.environ["GAVE_UP"]))
    rpc.shutdown(graceful=False)
    return "left"


@pytest.mark.parametrize(("timeout", "error"), [("x", TypeError), (-1, ValueError), (None, TypeError)])
def test_a_wrong_time_out_of_shutdown_is_refused_and_the_group_goes_on(timeout, error):
    with workers(1):
        with pytest.raises(error, match="timeout must"):
            rpc.shutdown(timeout=timeout)
        assert rpc.rpc_sync("worker0", echo, (1,)) == 1


def test_shutdown_times_out(tmp_path):
    env = {"GAVE_UP": f"{tmp_path}/gave_up"}
    results = run_ranks(run_and_leave, 3, one_does_not_come, start_method="forkserver", init=False, env=env)
    assert results == ["gave up", "left", "left"]


def run_and_hold_up(rank, folder):
    join(rank, 3, f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}")
    return hold_up(rank, folder)


def serve_until_told(path):
    while not os.path.exists(path):
        time.sleep(0.01)  # here, because errors name the function in which a worker is


def hold_up(rank, folder):
    told = f"{folder}/told"
    if rank == 0:
        ending._REPORT_S = 20  # the other workers may be slow to answer on a busy machine
        call = rpc.rpc_async("worker1", serve_until_told, args=(told,))
        eventually(lambda: rpc.rpc_sync("worker1", len, args=([],)) == 0)
        eventually(lambda: os.path.exists(f"{folder}/waits"))
        try:
            rpc.shutdown(timeout=0.5)
        except rpc.RpcTimeoutError as error:
            text = str(error)
        else:
            text = ""
        Path(told).touch()
        del call
        return text
    if rank == 2:
        Path(f"{folder}/waits").touch()
        serve_until_told(told)
    else:
        eventually(lambda: os.path.exists(told), 60)
    rpc.shutdown(graceful=False)
    return ""


def test_the_error_of_a_shutdown_that_times_out_says_what_the_other_workers_do(tmp_path):
    [text, *_] = run_ranks(run_and_hold_up, 3, str(tmp_path), start_method="forkserver", init=False)
    place = r"serve_until_told \(\S*test_shutdown\.py:\d+\)"
    assert re.search(rf"worker1 serves \S*serve_until_told for worker0 since [\d.]+ m?s, in {place}\.", text), text
    assert re.search(rf"worker2 serves no call and has not called shutdown\(\): it is in {place}\.", text), text
    assert "Let these calls end, call shutdown() on each worker, or pass a longer timeout." in text
    assert "join0" not in text and "Start the missing" not in text


def leave_alone(rank):
    start = time.monotonic()
    rpc.shutdown(graceful=False)
    return time.monotonic() - start


def test_an_ungraceful_shutdown_does_not_wait():
    assert max(run_ranks(run_and_leave, 3, leave_alone, start_method="forkserver", init=False)) < 5


def hold_a_reference(rank):
    rpc.api._ignore_rref_leak = False
    held = rpc.RRef(torch.ones(1))
    rref = rpc.remote(f"worker{(rank + 1) % 3}", torch.add, (torch.ones(1), 1))
    rpc.rpc_sync(f"worker{(rank + 1) % 3}", len, ([held],))
    assert rref.to_here() == 2
    rpc.shutdown()
    with pytest.raises(RuntimeError, match=re.escape("Cannot call to_here() on it after deletion.")):
        rref.to_here()
    with pytest.raises(RuntimeError, match=r"Cannot call fork an UserRRef after deletion\."):
        rpc.internal.serialize(rref)
    return "ok"


def test_references_held_at_shutdown_are_deleted():
    assert run_ranks(run_and_leave, 3, hold_a_reference, start_method="forkserver", init=False) == ["ok"] * 3


def use_in_the_next_group(rank):
    """Keeps an own RRef, one of the other worker, and one whose type has not been fetched, over the end of a group."""
    port, other = os.environ["MASTER_PORT"], f"worker{1 - rank}"
    join(rank, 2, f"tcp://127.0.0.1:{port}")
    mine = rpc.RRef(torch.ones(1))
    theirs = rpc.remote(other, torch.add, (torch.ones(1), 1))
    assert theirs.to_here() == 2
    rpc.shutdown()
    join(rank, 2, f"tcp://localhost:{port}", rpc_timeout=0)  # no time-out ends a call that hangs
    before, now = f"worker{rank} of the group at tcp://127.0.0.1", f"worker{rank} of the group at tcp://localhost"
    refused = rf"belongs to {before}:\d+, which has shut down\. It cannot be used by {now}:\d+"
    for rref in (mine, theirs):
        for use in (
            lambda rref=rref: rpc.rpc_sync(other, len, ([rref],)),
            lambda rref=rref: rpc.rpc_async(other, len, ([rref],)).wait(),
            lambda rref=rref: rpc.remote(other, len, ({"pickled": [rref, Value()]},)),
            lambda rref=rref: rpc.rpc_sync(f"worker{rank}", len, ([rref],)),
            lambda rref=rref: rpc.internal.serialize(rref),
            lambda rref=rref: rref.rpc_sync().sum(),
            lambda rref=rref: rref.remote().sum(),
        ):
            with pytest.raises(RuntimeError, match=refused):
                use()
        with torchrpc.autograd.context() as context_id, pytest.raises(RuntimeError, match=refused):
            rref.backward(context_id)
    with pytest.raises(RuntimeError, match=rf"after deletion\. It belongs to {before}:\d+, which has shut down\."):
        theirs.to_here()
    assert mine.local_value() == 1
    assert rpc.rpc_sync(other, len, ([rpc.RRef(1)],)) == 1
    rpc.shutdown()
    return "ok"


class Value:
    pass


def test_a_reference_of_an_earlier_group_is_refused_at_once_and_holds_nobody_up():
    results = run_ranks(use_in_the_next_group, 2, start_method="forkserver", init=False)
    assert results == ["ok"] * 2


def leak(rank):
    rpc.api._ignore_rref_leak = False
    rpc.api._delete_all_user_and_unforked_owner_rrefs = lambda: None
    rref = rpc.remote(f"worker{(rank + 1) % 3}", torch.add, (torch.ones(1), 1))
    rref.to_here()
    with pytest.raises(RuntimeError, match="Leaking RRef"):
        rpc.shutdown()
    assert not rpc._is_current_rpc_agent_set()
    return "ok"


def test_leaks_are_reported_on_request():
    assert run_ranks(run_and_leave, 3, leak, start_method="forkserver", init=False) == ["ok"] * 3


ENDING_SCRIPT = """
import subprocess, sys, threading, time
import torchrpc.rpc as rpc

arrived = []
go = threading.Event()

def serve(value):
    arrived.append(value)
    assert go.wait(60)
    time.sleep(0.3)  # worker 1 ends meanwhile
    return value

def check(end, method):
    other = subprocess.Popen([sys.executable, __file__, "1", end, method])
    join(0, method)
    futures = [rpc.rpc_async("worker1", serve, (i,)) for i in range(50)]
    assert [future.wait() for future in futures] == list(range(50))
    refused = None
    while not refused:
        try:
            rpc.rpc_sync("worker1", int, ("1",))
        except RuntimeError as error:
            refused = str(error)
    assert "worker1" in refused, refused
    assert other.wait() == 0
    rpc.shutdown(graceful=False)
    print("all answered")

def join(rank, method):
    options = rpc.TensorPipeRpcBackendOptions(init_method=method, num_worker_threads=64)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)

if __name__ == "__main__":
    rank, end, method = sys.argv[1:]
    if rank == "0":
        check(end, method)
    else:
        join(1, method)
        while len(arrived) < 50:
            time.sleep(0.01)  # until the calls have arrived
        go.set()
        if end == "shutdown":
            rpc.shutdown(graceful=False)
"""


@pytest.mark.parametrize("transport", ["native", "tensorpipe"])
@pytest.mark.parametrize("end", ["shutdown", "exit"])
def test_calls_that_a_worker_serves_when_it_ends_are_answered(run_python, tmp_path, end, transport):
    (tmp_path / "script.py").write_text(ENDING_SCRIPT)
    env = {"TORCHRPC_TRANSPORT": transport}
    assert "all answered" in run_python("script.py", "0", end, f"file://{tmp_path}/store", env=env).stdout


ARRIVED = []


def wait_for_file(path):
    ARRIVED.append(path)
    eventually(lambda: os.path.exists(path), 300)


def serve_for_long(rank):
    join(rank, 2, f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}")
    if rank == 0:
        path = os.environ["RETURN_FILE"]
        with pytest.raises(rpc.WorkerLostError, match="worker1 has shut down"):
            rpc.rpc_sync("worker1", wait_for_file, (path,))
        open(path, "w").close()
    else:
        eventually(lambda: ARRIVED)
    rpc.shutdown(graceful=False, timeout=0.3)
    return "left"


def test_a_call_that_is_not_answered_in_time_fails_when_its_worker_leaves(tmp_path):
    env = {"RETURN_FILE": f"{tmp_path}/return"}
    results = run_ranks(serve_for_long, 2, start_method="forkserver", init=False, env=env)
    assert results == ["left"] * 2


def echo(value):
    return value


def echo_back(value):
    """A function that needs a call of its own to answer."""
    return rpc.rpc_sync(rpc.get_worker_infos()[0].name, echo, (value,))


def call_beside_shutdown(rank, graceful, callers, timeout, comes, makes="calls"):
    """Threads call in a loop while the main thread shuts down. Returns its duration, and the threads' errors."""
    errors, counts = [], [0] * callers

    def call(index):
        try:
            while True:
                if makes == "references":
                    rpc.remote(f"worker{1 - rank}", echo, (index,))
                elif makes == "lookups":
                    torchrpc.lookup(f"object of {1 - rank}")
                elif index % 2:
                    rpc.rpc_async(f"worker{1 - rank}", echo_back, (index,)).wait()
                else:
                    rpc.rpc_sync(f"worker{1 - rank}", echo, (index,))
                counts[index] += 1
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    join(rank, 2, f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}")
    if makes == "lookups":
        torchrpc.register(f"object of {rank}", rpc.RRef(rank))
        rpc.api._barrier({"worker0", "worker1"})
    threads = [threading.Thread(target=call, args=(i,)) for i in range(callers)]
    for thread in threads:
        thread.start()
    eventually(lambda: all(counts) or errors)  # the other worker may end before each thread has made a call
    start = time.monotonic()
    try:
        if rank in comes:
            rpc.shutdown(graceful=graceful, timeout=timeout)
    except rpc.RpcTimeoutError:
        errors.append("timed out")
    duration = time.monotonic() - start
    for thread in threads:
        thread.join()  # worker 1 that does not come: ended by the loss of worker 0
    if rank not in comes:
        rpc.shutdown(graceful=False)
    return duration, errors


@pytest.mark.parametrize("callers", [1, 8])
@pytest.mark.parametrize("graceful", [True, False])
def test_shutdown_beside_threads_that_call_ends_their_calls_and_returns(graceful, callers):
    limit = 20
    args = (graceful, callers, limit, (0, 1))
    for duration, errors in run_ranks(call_beside_shutdown, 2, *args, start_method="forkserver", init=False):
        assert duration < limit
        assert len(errors) == callers, errors
        for error in errors:
            shut_down = re.match("(?s)ShutdownError: .*(shutting down|shut down|not been initialized)", error)
            assert shut_down or (not graceful and error.startswith("WorkerLostError")), error


@pytest.mark.parametrize("makes", ["references", "lookups"])
def test_shutdown_ends_the_threads_that_make_references_or_look_names_up(makes):
    limit = 20
    args = (True, 2, limit, (0, 1), makes)
    for duration, errors in run_ranks(call_beside_shutdown, 2, *args, start_method="forkserver", init=False):
        assert duration < limit
        assert len(errors) == 2 and all(error.startswith("ShutdownError: ") for error in errors), errors


CHAINS = """
import sys, time, torchrpc.rpc as rpc
options = rpc.TensorPipeRpcBackendOptions(init_method=sys.argv[1])
rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
refused = []
def again(future):
    try:
        rpc.rpc_async("worker0", abs, (-1,)).then(again)
    except rpc.ShutdownError as error:
        refused.append(error)
for _ in range(4):
    again(None)
rpc.shutdown(timeout=20)
while len(refused) < 4:
    time.sleep(0.01)  # the callbacks may still run
print("ended")
"""


def test_a_chain_of_callbacks_that_call_again_whatever_has_happened_ends_with_the_worker(run_python, tmp_path):
    assert run_python("-c", CHAINS, f"file://{tmp_path}/store").stdout == "ended\n"


def shut_down_without_the_store(rank, folder, graceful, world_size):
    while rank == 1 and world_size is None and not os.path.exists(folder / "first"):
        time.sleep(0.01)  # in a group that grows, worker 1 joins second and so knows worker 0
    join(rank, world_size, f"file://{folder}/store")
    (folder / "first").touch()
    eventually(lambda: len(rpc.get_worker_infos()) == 2)
    rpc.rpc_sync(f"worker{1 - rank}", echo, (1,))
    rpc.api._barrier({"worker0", "worker1"})
    if rank == 0:
        shutil.rmtree(folder)
    eventually(lambda: not os.path.exists(folder))
    start, error = time.monotonic(), ""
    try:
        rpc.shutdown(graceful=graceful, timeout=SHUTDOWN_S)
    except rpc.RpcError as exc:
        error = str(exc)
    return time.monotonic() - start, error


SHUTDOWN_S = 3.0


@pytest.mark.parametrize("world_size", [2, None])
@pytest.mark.parametrize("graceful", [True, False])
def test_shutdown_ends_in_time_although_the_file_of_the_store_is_gone(tmp_path, graceful, world_size):
    folder = tmp_path / "group"
    folder.mkdir()
    args = (folder, graceful, world_size)
    for duration, error in run_ranks(shut_down_without_the_store, 2, *args, start_method="forkserver", init=False):
        assert duration < SHUTDOWN_S + 1, error  # if the store's own time-out counted: one or two minutes
        # A worker may leave a group that grows without the store.
        assert ("the store through which the group" in error) == (graceful and world_size is not None), error


@pytest.mark.parametrize("callers", [1, 8])
def test_shutdown_times_out_although_threads_and_the_other_worker_go_on(callers):
    args = (True, callers, 1, (0,))
    (duration, errors), _ = run_ranks(call_beside_shutdown, 2, *args, start_method="forkserver", init=False)
    assert duration < 20
    assert "timed out" in errors and len(errors) == callers + 1, errors


def refused_call(rank):
    """Worker 0 shuts down while worker 1 still calls it: its own new calls fail, those that it serves may call."""
    join(rank, 2, f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}")
    if rank == 0:
        caller = threading.Thread(target=call_until_refused)
        caller.start()
        rpc.shutdown()
        caller.join()
        return "ended"
    eventually(lambda: len(rpc.rpc_sync("worker0", refusals_here)) == 2)
    refused, refused_remote = rpc.rpc_sync("worker0", refusals_here)
    assert refused == "worker0 is shutting down and makes no new calls"
    assert refused_remote == refused
    assert rpc.rpc_sync("worker0", echo_back_to, ("worker1", 7)) == 7
    assert rpc.rpc_sync("worker0", echo_back_in_threads, ("worker1", 6)) == [6] * 4
    assert rpc.rpc_sync("worker0", echo_back_in_coroutine, ("worker1", 8)) == 8
    assert rpc.rpc_sync("worker0", echo_back_in_batches, (torch.tensor(9),)).item() == 9
    rpc.shutdown()
    return "served"


refusals = []


def refusals_here():
    return refusals


def call_until_refused():
    while not refusals:
        try:
            rpc.rpc_sync("worker1", echo, (1,))
        except rpc.ShutdownError as error:
            refusals.append(str(error))
    try:
        rpc.remote("worker1", echo, (1,)).to_here()
    except rpc.ShutdownError as error:
        refusals.append(str(error))


def echo_back_in_threads(worker, value):
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        return list(threads.map(lambda _: rpc.rpc_sync(worker, echo, (value,)), range(4)))


def echo_back_to(worker, value):
    return rpc.rpc_async(worker, echo, (value,)).then(lambda done: rpc.rpc_sync(worker, echo, (done.value(),))).wait()


@torchrpc.batched
def echo_back_in_batches(values):
    return rpc.rpc_sync("worker1", echo, (values,))


async def echo_back_in_coroutine(worker, value):
    both = asyncio.gather(*(asyncio.create_task(one_more(worker, value)) for _ in range(2)))
    return (await both)[0]


async def one_more(worker, value):
    return await rpc.rpc_async(worker, echo, (value,))


def test_from_shutdown_on_own_calls_fail_and_served_functions_still_call():
    assert run_ranks(refused_call, 2, start_method="forkserver", init=False) == ["ended", "served"]


SCRIPT = """
import sys, time, torchrpc.rpc as rpc
options = rpc.TensorPipeRpcBackendOptions(init_method=sys.argv[1])
rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
rpc.rpc_async("worker0", time.sleep, (0.5,))
print("end of script")
"""


def test_a_script_may_end_without_shutdown_and_with_a_call_under_way(run_python, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    result = run_python("script.py", f"file://{tmp_path}/store", check=False)
    assert "end of script" in result.stdout
    assert result.returncode == 0, result.stderr


def join_one_by_one(rank):
    """A group without a fixed size: each worker joins, calls all members, and leaves."""
    join(rank, None, os.environ["METHOD"])
    seen = {}

    def see():
        for info in rpc._get_current_rpc_agent().get_worker_infos():
            if info.name not in seen:
                seen[info.name] = rpc.rpc_sync(info.name, rpc.get_worker_info).id
        return len(seen) == 3

    eventually(see)
    torch.futures.wait_all([rpc.rpc_async(name, note, (rank,)) for name in seen])
    eventually(lambda: len(DONE) == 3)
    rpc.shutdown()
    return seen


def test_workers_join_and_leave_a_group_without_a_size(tmp_path):
    env = {"METHOD": f"file://{tmp_path}/store"}  # a store in the process of rank 0 would end with it
    results = run_ranks(join_one_by_one, 3, start_method="forkserver", init=False, env=env)
    assert results == [{"worker0": 0, "worker1": 1, "worker2": 2}] * 3


def fail_on_rank_1(rank):
    if rank == 1:
        raise ValueError("wrong on purpose")
    time.sleep(60)  # until the helper ends it


def test_the_helper_reports_a_failing_rank_and_ends_the_others():
    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*wrong on purpose"):
        run_ranks(fail_on_rank_1, 2, start_method="forkserver", init=False)
    with pytest.raises(RankError, match=r"rank 0 died \(exit code 3\)"):
        run_ranks(die, 1, start_method="forkserver", init=False)
    assert time.monotonic() - start < 50


def die(rank):
    os._exit(3)


def values_of_a_rank(rank):
    return torch.full((3,), rank), torch.nn.Parameter(torch.ones(2)), {"rank": rank}


def test_the_helper_returns_tensors():
    for rank, (tensor, parameter, rest) in enumerate(run_ranks(values_of_a_rank, 2, start_method="forkserver")):
        assert tensor.tolist() == [rank] * 3 and parameter.tolist() == [1.0, 1.0] and rest == {"rank": rank}


def a_result_that_cannot_be_pickled(rank):
    return lambda: rank


def test_the_helper_says_which_result_cannot_be_returned():
    with pytest.raises(RankError, match=r"rank \d failed:\nits result, a function, cannot be pickled"):
        run_ranks(a_result_that_cannot_be_pickled, 2, start_method="forkserver")


def test_the_helper_times_out_on_ranks_that_hang():
    with pytest.raises(RankError, match=r"ranks \[0, 1\] did not end in 1 s"):
        run_ranks(hang, 2, start_method="forkserver", init=False, timeout=1)


def hang(rank):
    time.sleep(60)  # the hang under test


# --- Names of upstream's module that scripts replace ---

REPLACED_ON_ALL = [
    "_set_and_start_rpc_agent",
    "_get_current_rpc_agent",
    "_wait_all_workers",
    "_all_gather",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_destroy_rref_context",
    "_cleanup_python_rpc_handler",
    "_reset_current_rpc_agent",
]
REPLACED_ON_THE_LEADER = ["_gather_to_leader", "rpc_async"]
REPLACED_ON_A_FOLLOWER = ["_broadcast_to_followers", "rpc_sync"]


def used_replacements(rank, names):
    """Replace names of `api` by functions that call the originals; return the names that a group's life has used."""
    used = set()

    def replace(name):
        original = getattr(rpc.api, name)

        @functools.wraps(original)
        def replacement(*args, **kwargs):
            used.add(name)
            return original(*args, **kwargs)

        setattr(rpc.api, name, replacement)

    for name in names:
        replace(name)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    rpc.shutdown()
    return sorted(used)


def test_names_of_api_that_a_script_replaces_are_used():
    names = [*REPLACED_ON_ALL, *REPLACED_ON_THE_LEADER, *REPLACED_ON_A_FOLLOWER]
    leader, follower = run_ranks(used_replacements, 2, names, start_method="forkserver", init=False)
    assert leader == sorted(set(names) - set(REPLACED_ON_A_FOLLOWER))
    assert follower == sorted(set(names) - set(REPLACED_ON_THE_LEADER))


def shut_down_here(graceful):
    rpc.shutdown(graceful=graceful)


def test_shutdown_in_a_served_call_is_an_error_and_the_group_goes_on():
    with workers(2):
        for graceful in (True, False):
            with pytest.raises(RuntimeError, match=r"shutdown\(\) cannot be called by a function .* main thread"):
                rpc.rpc_sync("worker1", shut_down_here, args=(graceful,))
            with pytest.raises(RuntimeError, match=r"shutdown\(\) cannot be called by a function"):
                rpc.rpc_sync("worker0", shut_down_here, args=(graceful,))
        assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1)).item() == 2


FIRST_ERROR = """
import os, sys, time, torch.multiprocessing as mp, torchrpc.rpc as rpc


class SlowEnd:
    def __del__(self):
        time.sleep(0.5)  # while the interpreter ends, as large programs do


def run(rank):
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        mp.slow_end = SlowEnd()
        rpc.rpc_sync("worker1", pow, args=(2, 3))
        raise ValueError("the cause")
    served = rpc.rpc_async("worker0", time.sleep, args=(float(sys.argv[2]),))
    while True:
        rpc.rpc_sync("worker0", pow, args=(2, 3))


if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=sys.argv[1])
    mp.spawn(run, nprocs=2)
"""


@pytest.mark.alone("a process must end within a second: beside three compilers it did not in one of ten runs")
@pytest.mark.parametrize("serves_s", [0, 0.7], ids=["is_lost", "refuses_calls"])
def test_spawn_shows_the_error_of_the_worker_that_failed_first(run_python, tmp_path, serves_s):
    script = tmp_path / "first_error.py"
    script.write_text(FIRST_ERROR)
    shown = run_python(script, free_port(), serves_s, check=False).stderr
    assert "ValueError: the cause" in shown and "WorkerLostError" not in shown and "ShutdownError" not in shown


def shut_down_twice(rank, graceful, by_signal):
    join(rank, 2, f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}")
    if rank == 1:
        rpc.rpc_sync("worker0", is_ending)  # returns when worker0 has entered shutdown()
    elif by_signal:
        signal.signal(signal.SIGTERM, lambda *_: rpc.shutdown(graceful=graceful))
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGTERM]).start()
    else:
        second = threading.Thread(target=rpc.shutdown)
        threading.Timer(0.2, second.start).start()
    rpc.shutdown()
    if rank == 0 and not by_signal:
        second.join(20)
        assert not second.is_alive()
    return "ok"


def is_ending():
    time.sleep(1)  # so that the second shutdown() comes while the first one waits for the caller


@pytest.mark.parametrize(("graceful", "by_signal"), [(True, True), (False, True), (True, False)])
def test_shutdown_may_be_asked_for_again_while_it_runs(graceful, by_signal):
    results = run_ranks(shut_down_twice, 2, graceful, by_signal, start_method="forkserver", init=False, timeout=60)
    assert results == ["ok"] * 2


def shut_down_while_the_leader_comes_back(rank, report_arrives):
    """Rank 1 takes worker0 for lost when it reports to it, as after a silence, and then sees that it lives."""
    join(rank, 2, f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}")
    if rank == 1:
        granted, lost_among = gather.Gathering._when_granted, gather.Gathering._lost_among
        reports = []

        def fail_the_first(self, first, again):
            reports.append(first)
            if len(reports) > 1 or report_arrives:
                granted(self, first, again)
            if len(reports) == 1:
                raise rpc.WorkerLostError("worker0 is silent", "worker0")

        def lost_when_confirmed(self, names, confirm_s=0):
            return set(names) if confirm_s else lost_among(self, names)

        gather.Gathering._when_granted = fail_the_first
        gather.Gathering._lost_among = lost_when_confirmed
    else:
        time.sleep(1)  # until rank 1 leads by itself
    rpc.shutdown()
    return len(reports) if rank == 1 else 0


@pytest.mark.parametrize("report_arrives", [False, True])
def test_a_worker_that_leads_in_place_of_another_gives_the_lead_back(report_arrives):
    results = run_ranks(
        shut_down_while_the_leader_comes_back, 2, report_arrives, start_method="forkserver", init=False, timeout=60
    )
    assert results[1] >= 2  # to worker0 and to itself; then to worker0 again, unless that has the first report
