"""Calls that may be repeated: retries and idempotency keys, on real workers whose connections break."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from waiting import eventually

import torchrpc.rpc as rpc
from torchrpc.testing import run_ranks, start_process

TIMEOUT_S = 60

runs: list = []
deleted: list = []


def record(value, delay_s=0.0):
    """Runs on the callee."""
    runs.append(value)
    time.sleep(delay_s)  # the function under test is slow
    return len(runs)


def record_and_fail(value):
    runs.append(value)
    raise KeyError(value)


def count_runs():
    return len(runs)


@rpc.functions.async_execution
def record_later(value):
    future = torch.futures.Future()
    runs.append(value)
    threading.Timer(0.2, lambda: future.set_result(len(runs))).start()
    return future


async def record_in_coroutine(value):
    runs.append(value)
    return len(runs)


class Counter:
    def __init__(self):
        runs.append("counter")
        self.count = 0

    def add(self):
        self.count += 1
        return self.count

    def __del__(self):
        deleted.append("counter")


def count_deleted():
    return len(deleted)


@torch.jit.script
def doubled(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def make_tensor(size):
    runs.append(size)
    return torch.ones(size)


def make_rref():
    runs.append("rref")
    return rpc.RRef(torch.ones(1))


def init(rank, size=2, **options):
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=TIMEOUT_S, **options)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)


def run(rank, body, options):
    init(rank, **(options if rank == 1 else {}))
    if rank == 0:
        body()
    rpc.shutdown()


def in_group(body, **options):
    """Run `body` on worker0 while worker1, which has the options, serves."""
    run_ranks(run, 2, body, options, start_method="forkserver", init=False)


# --- keys ---


def check_keys():
    for call in (record, record_later, record_in_coroutine):
        before = rpc.rpc_sync("worker1", count_runs)
        key = f"key of {call}"
        first = rpc.rpc_sync("worker1", call, args=(1,), idempotency_key=key)
        again = rpc.rpc_async("worker1", call, args=(1,), idempotency_key=key.encode()).wait()
        assert first == again == before + 1
        assert rpc.rpc_sync("worker1", count_runs) == before + 1
        assert rpc.rpc_sync("worker1", call, args=(1,), idempotency_key=key + "!") == before + 2


def test_a_key_runs_once_whatever_kind_of_function_it_names():
    in_group(check_keys)


def check_kinds():
    for function, args in ((torch.add, (torch.ones(2), 1)), (doubled, (torch.ones(2),))):
        results = [rpc.rpc_sync("worker1", function, args=args, idempotency_key=str(function)) for _ in range(3)]
        assert all(result.equal(torch.full((2,), 2.0)) for result in results)
    assert int(rpc.rpc_sync("worker1", rpc._get_debug_info)["agent.repeated_calls"]) == 4


def test_operators_and_script_functions_have_keys_too():
    in_group(check_kinds)


def check_exceptions():
    for _ in range(3):
        with pytest.raises(KeyError, match="seat"):
            rpc.rpc_sync("worker1", record_and_fail, args=("seat",), idempotency_key="k", retries=2)
    assert rpc.rpc_sync("worker1", count_runs) == 1


def test_an_exception_is_the_answer_to_a_key_and_ends_the_retries():
    in_group(check_exceptions)


def check_other_call():
    rpc.rpc_sync("worker1", record, args=(1,), idempotency_key="k")
    for function, args in ((record, (2,)), (record_later, (1,)), (torch.neg, (torch.ones(1),))):
        with pytest.raises(RuntimeError, match=r'key "k" of worker0.*another function, or other arguments'):
            rpc.rpc_sync("worker1", function, args=args, idempotency_key="k")
    assert rpc.rpc_sync("worker1", count_runs) == 1


def test_a_key_with_another_function_or_other_arguments_is_refused():
    in_group(check_other_call)


def check_results_that_are_gone():
    for function, args, why in ((make_tensor, (1 << 23,), "too large"), (make_rref, (), "RRefs")):
        rpc.rpc_sync("worker1", function, args=args, idempotency_key=why)
        with pytest.raises(RuntimeError, match=f"has run .*does not run it again.*{why}"):
            rpc.rpc_sync("worker1", function, args=args, idempotency_key=why)
    assert rpc.rpc_sync("worker1", count_runs) == 2


def test_a_call_whose_result_is_gone_does_not_run_again():
    in_group(check_results_that_are_gone)


def check_threads():
    results = []
    threads = [
        threading.Thread(
            target=lambda: results.append(rpc.rpc_sync("worker1", record, args=(1, 0.3), idempotency_key="k"))
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [1] * 8


def test_callers_that_use_one_key_at_a_time_get_one_result():
    in_group(check_threads)


def check_remote():
    first = rpc.remote("worker1", Counter, idempotency_key="counter")
    again = rpc.remote("worker1", Counter, idempotency_key="counter")
    assert [first.rpc_sync().add(), again.rpc_sync().add(), first.rpc_sync().add()] == [1, 2, 3]
    del first
    assert again.rpc_sync().add() == 4
    third = rpc.remote("worker1", Counter, idempotency_key="counter")
    assert third.rpc_sync().add() == 5
    assert rpc.rpc_sync("worker1", count_runs) == 1
    other = rpc.remote("worker1", Counter, idempotency_key="another")
    assert other.rpc_sync().add() == 1
    del again, third
    eventually(lambda: int(rpc.rpc_sync("worker1", rpc._get_debug_info)["rref.owned"]) == 1, TIMEOUT_S)
    # The owner drops the object a moment after its RRefs.
    eventually(lambda: rpc.rpc_sync("worker1", count_deleted) == 1, TIMEOUT_S)
    gone = rpc.remote("worker1", Counter, idempotency_key="counter")
    with pytest.raises(RuntimeError, match="nobody had an RRef to it"):
        gone.rpc_sync().add()
    assert rpc.rpc_sync("worker1", count_runs) == 2


def test_remote_with_a_key_gives_the_same_object_while_somebody_holds_it():
    in_group(check_remote)


def check_allow_list():
    for _ in range(2):
        with pytest.raises(rpc.NotAllowedError, match="make_tensor"):
            rpc.rpc_sync("worker1", make_tensor, args=(1,), idempotency_key="k", retries=1)
    assert rpc.rpc_sync("worker1", record, args=(1,), idempotency_key="l") == 1
    assert rpc.rpc_sync("worker1", record, args=(1,), idempotency_key="l") == 1


def test_an_allow_list_holds_for_calls_with_keys():
    in_group(check_allow_list, allowed_functions=[record])


def check_self():
    assert [rpc.rpc_sync("worker0", record, args=(1,), idempotency_key="k", retries=1) for _ in range(2)] == [1, 1]


def test_a_worker_may_use_keys_for_itself():
    in_group(check_self)


def check_bad_arguments():
    call = ("worker1", record, (1,))
    for error, arguments, text in (
        (TypeError, {"retries": 1.5}, "retries must be an int"),
        (TypeError, {"retries": "3"}, "retries must be an int"),
        (ValueError, {"retries": -1}, "between 0 and 1000"),
        (ValueError, {"retries": 1001}, "between 0 and 1000"),
        (TypeError, {"idempotency_key": 7}, "must be a str or bytes"),
        (ValueError, {"idempotency_key": ""}, "1 to 256 bytes, but has 0"),
        (ValueError, {"idempotency_key": "x" * 257}, "has 257"),
    ):
        with pytest.raises(error, match=text):
            rpc.rpc_sync(*call, **arguments)
        with pytest.raises(error, match=text):
            rpc.rpc_async(*call, **arguments)
    with pytest.raises(TypeError, match="retries"):
        rpc.remote("worker1", Counter, retries=1)
    with pytest.raises(RuntimeError, match="RRefs among its arguments cannot have retries"):
        rpc.rpc_sync("worker1", record, args=(rpc.RRef(1),), retries=1)
    for error, fields in (
        (TypeError, {"retries": None}),
        (ValueError, {"first_delay_s": 0}),
        (ValueError, {"first_delay_s": float("nan")}),
        (ValueError, {"max_delay_s": 0.001}),
        (TypeError, {"after_restart": 1}),
        (ValueError, {"breaker_losses": -1}),
    ):
        with pytest.raises(error, match=next(iter(fields))):
            rpc.RetryPolicy(**fields)


def test_bad_arguments_are_refused_with_their_names():
    in_group(check_bad_arguments)


# --- the audit log ---


def check_audit():
    rpc.rpc_sync("worker1", record, args=(1,), idempotency_key="k")
    rpc.rpc_sync("worker1", record, args=(1,), idempotency_key="k")
    rpc.rpc_sync("worker1", record, args=(1,))


def test_the_audit_log_shows_repeats(tmp_path):
    in_group(check_audit, audit_log=str(tmp_path / "audit.log"))
    events = [json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines()]
    calls = [event for event in events if event.get("function", "").endswith(".record")]
    shown = [(event.get("key"), event.get("attempt"), event.get("repeat")) for event in calls]
    assert shown == [("k", 1, False), ("k", 1, True), (None, None, None)]
    assert {event["outcome"] for event in calls} == {"ok"}


# --- workers that die ---


def serve_until_killed(rank, folder):
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{folder}/store", rpc_timeout=TIMEOUT_S, liveness_timeout=5
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, rpc_backend_options=options)  # the group grows
    (Path(folder) / f"pid{rank}").write_text(str(os.getpid()))
    eventually((Path(folder) / "end").exists, TIMEOUT_S)
    rpc.shutdown()


def note_and_wait(folder, name):
    """Runs on the callee: leaves a file for each run, then waits to be killed."""
    with (Path(folder) / name).open("a") as file:
        file.write("run\n")
    # The process is killed while it serves the call.
    time.sleep(0.0 if (Path(folder) / "go_on").exists() else TIMEOUT_S)
    return os.getpid()


def read_runs(folder, name):
    path = Path(folder) / name
    return len(path.read_text().splitlines()) if path.exists() else 0


def call_and_restart(rank, folder):
    """Rank 0 calls, rank 1 is killed and started again by rank 2, which is no member."""
    folder = Path(folder)
    if rank == 1:
        return serve_until_killed(1, folder)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{folder}/store", rpc_timeout=TIMEOUT_S, liveness_timeout=5
    )
    rpc.init_rpc("worker0", rank=0, rpc_backend_options=options)
    eventually((folder / "pid1").exists, TIMEOUT_S)
    eventually(lambda: len(rpc.get_worker_infos()) == 2, TIMEOUT_S)
    policy = {"retries": 1000, "max_delay_s": 0.2, "breaker_losses": 0}
    again = rpc.rpc_async(
        "worker1", note_and_wait, args=(folder, "again"), retries=rpc.RetryPolicy(**policy, after_restart=True)
    )
    once = rpc.rpc_async("worker1", note_and_wait, args=(folder, "once"), retries=rpc.RetryPolicy(**policy))
    plain = rpc.rpc_async("worker1", note_and_wait, args=(folder, "plain"))
    eventually(lambda: all(read_runs(folder, name) == 1 for name in ("again", "once", "plain")), TIMEOUT_S)
    earlier = int((folder / "pid1").read_text())
    (folder / "go_on").touch()
    os.kill(earlier, signal.SIGKILL)
    with pytest.raises(rpc.WorkerLostError, match="lost"):
        plain.wait()
    # A call that begins while nobody is there waits for the one that comes.
    late = rpc.rpc_async("worker1", note_and_wait, args=(folder, "late"), retries=rpc.RetryPolicy(**policy))
    (folder / "killed").touch()
    with pytest.raises(rpc.WorkerLostError, match=r"started again.*may have run"):
        once.wait()
    assert again.wait() != earlier
    assert late.wait() == again.wait()
    assert [read_runs(folder, name) for name in ("again", "once", "plain", "late")] == [2, 1, 1, 1]
    (folder / "end").touch()
    rpc.shutdown()


def test_a_restarted_worker_gets_only_the_calls_that_may_run_there(tmp_path):
    caller = start_process(call_and_restart, 0, tmp_path)
    eventually((tmp_path / "store").exists, TIMEOUT_S)
    first = start_process(serve_until_killed, 1, tmp_path)
    eventually((tmp_path / "killed").exists, TIMEOUT_S)
    first.join()
    second = start_process(serve_until_killed, 1, tmp_path)
    caller.join(TIMEOUT_S)
    second.join(TIMEOUT_S)
    assert (caller.exitcode, second.exitcode) == (0, 0)
