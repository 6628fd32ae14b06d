"""The first calls of a group: what a program sets up right after `init_rpc` is there when its functions run."""

import contextlib
import time
from datetime import timedelta

import pytest
import torch
from waiting import eventually

import torchrpc.rpc as rpc
from torchrpc.rpc import backend_registry
from torchrpc.rpc._group import gather
from torchrpc.testing import run_ranks

TIMEOUT_S = 30

# A program has a few milliseconds after init_rpc, and a little less after a gathering.
short_times = pytest.mark.alone("a program must go on within milliseconds, which it does not where others run as well")

ready = ""


def read_ready():
    return ready


def echo(value):
    return value


def join(rank, size, url):
    options = rpc.TensorPipeRpcBackendOptions(init_method=url, rpc_timeout=TIMEOUT_S)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)


def store():
    return torch.distributed.PrefixStore("test", rpc._group.rendezvous._store)


def tell(key):
    store().set(key, "1")


def wait_until_told(key):
    store().wait([key], timedelta(seconds=TIMEOUT_S))


@contextlib.contextmanager
def before_init_ends(step):
    """In the block, `init_rpc` runs `step` when the group has formed, or this worker has joined it."""

    def with_step(original):
        def init(*args):
            agent = original(*args)
            step()
            return agent

        return init

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_init_static_group", "_init_dynamic_group"):
            patch.setattr(backend_registry, name, with_step(getattr(backend_registry, name)))
        yield


def call_and_tell():
    """Call worker0 before it is set up; the operator arrives after the call, and is never kept."""
    future = rpc.rpc_async("worker0", read_ready)
    rpc.rpc_sync("worker0", torch.add, args=(torch.ones(1), 1))
    tell("called")
    return future


# --- A worker that is late ---


def run_late_init(rank, size, url):
    global ready
    with before_init_ends(lambda: wait_until_told("called")) if rank == 0 else contextlib.nullcontext():
        join(rank, size, url)
    ready = f"worker{rank} is set up"
    answer = ""
    if rank == 0:
        wait_until_told("answered")
    else:
        eventually(lambda: len(rpc.api._get_current_rpc_agent().get_worker_infos()) == 2)  # worker0 may join second
        answer = call_and_tell().wait()
        tell("answered")
    rpc.shutdown()
    return answer


@short_times
@pytest.mark.parametrize("grows", [False, True])
def test_a_call_that_arrives_before_init_rpc_has_returned_finds_what_is_set_up_after_it(tmp_path, grows):
    size = None if grows else 2
    url = f"file://{tmp_path}/store"
    answers = run_ranks(run_late_init, 2, size, url, start_method="forkserver", init=False)
    assert answers == ["", "worker0 is set up"]


def run_late_leader(rank, url):
    global ready
    join(rank, 3, url)
    ready = "before"
    distribute = gather.Gathering._distribute_to

    def distribute_late(self, *args):
        distribute(self, *args)
        wait_until_told("called")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(gather, "_KEEP_CALLS_S", TIMEOUT_S, raising=False)
            patch.setattr(gather.Gathering, "_distribute_to", distribute_late)
        rpc.api._all_gather(None)
    ready = "gathered"
    answer = call_and_tell().wait() if rank == 1 else ""
    rpc.shutdown()
    return answer


@short_times
def test_a_call_that_arrives_before_all_gather_has_returned_finds_what_is_set_up_after_it(tmp_path):
    url = f"file://{tmp_path}/store"
    assert run_ranks(run_late_leader, 3, url, start_method="forkserver", init=False) == ["", "gathered", ""]


def run_silent_follower(rank, url):
    join(rank, 3, url)
    if rank == 2:
        with pytest.MonkeyPatch.context() as patch:
            record = gather.record_all

            def record_late(*args):
                wait_until_told("answered")
                record(*args)

            patch.setattr(gather, "record_all", record_late)
            rpc.api._all_gather(None)
    else:
        rpc.api._all_gather(None)
        if rank == 1:
            assert rpc.rpc_sync("worker0", echo, args=("answered",), timeout=TIMEOUT_S) == "answered"
            tell("answered")
    rpc.shutdown()


def test_a_follower_that_does_not_answer_keeps_no_call_back_for_long(tmp_path):
    run_ranks(run_silent_follower, 3, f"file://{tmp_path}/store", start_method="forkserver", init=False)


# --- Nothing waits for itself ---


def run_calls_in_init(rank, size, url):
    answers = []

    def call_each_other():
        answers.extend(rpc.rpc_sync(f"worker{other}", echo, args=(rank,)) for other in range(size))
        rpc.api._all_gather(None)

    with before_init_ends(call_each_other):
        join(rank, size, url)
    rpc.shutdown()
    return answers


def test_workers_whose_start_includes_calls_to_each_other_and_to_themselves_are_answered(tmp_path):
    answers = run_ranks(run_calls_in_init, 3, 3, f"file://{tmp_path}/store", start_method="forkserver", init=False)
    assert answers == [[rank] * 3 for rank in range(3)]


def run_failing_init(rank, url):
    def fail():
        wait_until_told("called")
        raise RuntimeError("this start fails")

    if rank == 0:
        with before_init_ends(fail), pytest.raises(RuntimeError, match="this start fails"):
            join(rank, 2, url)
        return None
    join(rank, 2, url)
    begin = time.monotonic()
    with contextlib.suppress(RuntimeError):
        call_and_tell().wait()
    seconds = time.monotonic() - begin
    rpc.shutdown(graceful=False)
    return seconds


def test_the_calls_to_a_worker_whose_init_rpc_fails_end(tmp_path):
    url = f"file://{tmp_path}/store"
    _, seconds = run_ranks(run_failing_init, 2, url, start_method="forkserver", init=False)
    assert seconds < TIMEOUT_S / 2


# --- Many starts, as programs make them ---


def run_starts(rank, size, python, starts):
    """Join and leave again and again. Return for each start when init_rpc returned, and whether peers were early."""
    global ready
    seen = []
    for number in range(starts):
        ready = ""
        join(rank, size, "env://")
        returned = time.monotonic()
        ready = f"start {number}"
        early = [rpc.rpc_sync(f"worker{other}", read_ready) != ready for other in range(python)]
        seen.append((returned, any(early)))
        rpc.shutdown()
    return seen


def counts(seen):
    """Return in how many starts a call was early, and in how many rank 0 returned last."""
    early = last = 0
    for start in zip(*seen, strict=True):
        early += any(is_early for _, is_early in start)
        last += start[0][0] == max(returned for returned, _ in start)
    return early, last


@short_times
@pytest.mark.parametrize("size", [2, 4, 8])
def test_programs_win_the_race_for_what_they_set_up_after_init_rpc(size):
    starts = 80 // size
    seen = run_ranks(run_starts, size, size, size, starts, start_method="forkserver", init=False, timeout=100)
    early, last = counts(seen)
    assert early <= starts * 3 / 80
    assert last <= starts / 4
