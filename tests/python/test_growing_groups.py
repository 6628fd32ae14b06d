"""Groups without a fixed size: workers join and leave while the others work."""

import functools
import os
import socket
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from waiting import eventually, remains

import torchrpc.rpc as rpc
from torchrpc.rpc import _utils
from torchrpc.testing import run_ranks, start_process

TIMEOUT_S = 30


def is_served(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def names():
    return sorted(worker.name for worker in rpc.api._get_current_rpc_agent().get_worker_infos())


class Member:
    """One process of a group: joins, leaves, and reports its steps to the others by files."""

    def __init__(self, rank, folder, method):
        self.rank, self.folder, self.method = rank, Path(folder), method

    def join(self):
        options = rpc.TensorPipeRpcBackendOptions(init_method=self.method, rpc_timeout=TIMEOUT_S)
        rpc.init_rpc(f"worker{self.rank}", rank=self.rank, rpc_backend_options=options)

    def report(self, event):
        (self.folder / f"{self.rank}_{event}").touch()

    def wait_for_event(self, rank, event):
        eventually((self.folder / f"{rank}_{event}").exists, TIMEOUT_S)

    def wait_for_event_of_all(self, event):
        for rank in range(3):
            self.wait_for_event(rank, event)


def run_member(rank, scenario, folder, kind):
    port = int(os.environ["MASTER_PORT"])
    method = f"tcp://127.0.0.1:{port}" if kind == "tcp" else f"file://{folder}/store"
    return scenario(Member(rank, folder, method), port if kind == "tcp" else None)


def run_group(size, scenario, folder, kind):
    return run_ranks(run_member, size, scenario, str(folder), kind, start_method="forkserver", init=False, timeout=60)


@pytest.fixture(params=["tcp", "file"])
def kind(request):
    return request.param


def join_one_by_one(member, port):
    if member.rank > 0:
        member.wait_for_event(member.rank - 1, "joined")
    member.join()
    seen = names()
    member.report("joined")
    member.wait_for_event(2, "joined")
    answers = [rpc.rpc_sync(f"worker{to}", torch.add, (torch.ones(1), to)).item() for to in range(3)]
    member.report("called")
    member.wait_for_event_of_all("called")
    rpc.shutdown()
    return seen, answers


def test_a_worker_that_joins_later_is_known_to_all_members(tmp_path, kind):
    results = run_group(3, join_one_by_one, tmp_path, kind)
    everyone = ["worker0", "worker1", "worker2"]
    assert [seen for seen, _ in results] == [everyone[:1], everyone[:2], everyone]
    assert [answers for _, answers in results] == [[1.0, 2.0, 3.0]] * 3


def leave_in_order(member, port):
    """Rank 0, which serves the store, leaves first, and its process ends."""
    member.join()
    member.report("joined")
    member.wait_for_event_of_all("joined")
    if member.rank == 0:
        rpc.shutdown()
        member.report("left")
        return names_or_none()
    member.wait_for_event(0, "left")
    if port:
        eventually(lambda: not is_served(port), TIMEOUT_S)
    with pytest.raises(RuntimeError, match=r"could not find destination.*worker1, worker2"):
        rpc.rpc_sync("worker0", torch.ones, (1,))
    answer = rpc.rpc_sync(f"worker{3 - member.rank}", torch.add, (torch.ones(1), 1)).item()
    member.report("called")
    member.wait_for_event(3 - member.rank, "called")
    if member.rank == 2:
        member.wait_for_event(1, "left")
        assert names() == ["worker2"]
    rpc.shutdown()
    member.report("left")
    return answer


def names_or_none():
    return names() if rpc.api._is_current_rpc_agent_set() else None


def test_the_first_worker_may_leave(tmp_path, kind):
    assert run_group(3, leave_in_order, tmp_path, kind) == [None, 2.0, 2.0]


def join_again(member, port):
    seen = []
    for time_ in range(2):
        if member.rank == 1:
            member.wait_for_event(0, f"ready{time_}")
            member.join()
            seen.append(rpc.rpc_sync("worker0", names))
            rpc.shutdown()
            member.report(f"left{time_}")
        else:
            if time_ == 0:
                member.join()
            member.report(f"ready{time_}")
            member.wait_for_event(1, f"left{time_}")
            seen.append(names())
    if member.rank == 0:
        rpc.shutdown()
    return seen


def test_a_worker_may_join_again(tmp_path, kind):
    stayed, returned = run_group(2, join_again, tmp_path, kind)
    assert stayed == [["worker0"]] * 2
    assert returned == [["worker0", "worker1"]] * 2


def join_and_die(method, name, rank):
    options = rpc.TensorPipeRpcBackendOptions(init_method=method, rpc_timeout=TIMEOUT_S)
    rpc.init_rpc(name, rank=rank, rpc_backend_options=options)
    assert rpc.rpc_sync("worker0", pow, (2, 3)) == 8
    os._exit(0)


def die_after_joining(member, name, rank):
    process = start_process(join_and_die, member.method, name, rank)
    process.join(TIMEOUT_S)
    assert process.exitcode == 0


def take_over(member, port):
    """Worker 1 joins under the rank of a dead worker, then another rank under the name of a dead one."""
    if member.rank == 0:
        member.join()
        member.report("ready")
        member.wait_for_event(1, "joined")
        seen = names()
        answer = rpc.rpc_sync("worker1", torch.add, (torch.ones(1), 1)).item()
        member.report("called")
        member.wait_for_event(1, "done")
        rpc.shutdown()
        return seen, answer
    member.wait_for_event(0, "ready")
    die_after_joining(member, "another", 1)
    member.join()
    member.report("joined")
    member.wait_for_event(0, "called")
    die_after_joining(member, "moves", 5)
    die_after_joining(member, "moves", 6)
    seen = rpc.rpc_sync("worker0", names)
    member.report("done")
    rpc.shutdown()
    return seen


def test_a_worker_takes_the_rank_or_the_name_of_a_dead_one(tmp_path, kind):
    first, second = run_group(2, take_over, tmp_path, kind)
    assert first == (["worker0", "worker1"], 2.0)
    assert second == ["moves", "worker0", "worker1"]


def form_groups(member, port, sizes):
    for number, size in enumerate(sizes):
        options = rpc.TensorPipeRpcBackendOptions(init_method=member.method, rpc_timeout=TIMEOUT_S)
        rpc.init_rpc(f"worker{member.rank}", rank=member.rank, world_size=size, rpc_backend_options=options)
        member.report(f"joined{number}")
        member.wait_for_event_of_all(f"joined{number}")
        assert rpc.rpc_sync(f"worker{2 - member.rank}", pow, (2, 3)) == 8
        member.report(f"called{number}")
        member.wait_for_event_of_all(f"called{number}")
        rpc.shutdown()
        member.report(f"left{number}")
        member.wait_for_event_of_all(f"left{number}")


@pytest.mark.parametrize("sizes", [(None, 3, None), (3, None, None, 3)])
def test_groups_of_both_kinds_follow_one_another_on_one_store(tmp_path, kind, sizes):
    run_group(3, functools.partial(form_groups, sizes=sizes), tmp_path, kind)


class Watched(dist.PrefixStore):
    """A store that sets `asked` when a worker has asked for the token."""

    def __init__(self, store):
        super().__init__("group", store)
        self.asked = threading.Event()

    def compare_set(self, *args):
        value = super().compare_set(*args)
        self.asked.set()
        return value


def wait_to_leave(store):
    """Start a thread that waits for the token, and appends its name to the list when it has it."""
    store, entered = Watched(store), []

    def leave():
        with _utils._group_membership_management(store, "leaver", False):
            entered.append("leaver")

    thread = threading.Thread(target=leave)
    thread.start()
    assert store.asked.wait(TIMEOUT_S)
    return thread, entered


def store_with_holder():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    group = dist.PrefixStore("group", store)
    assert group.compare_set(_utils._TOKEN, "", "holder") == b"holder"
    return store, group


def test_a_worker_that_waits_for_the_token_can_use_the_store():
    """Otherwise a holder that calls the waiting worker would wait for that worker."""
    store, group = store_with_holder()
    thread, entered = wait_to_leave(store)
    store.set("address", "here")
    remains(lambda: store.get("address") == b"here" and not entered)
    group.set(_utils._TOKEN, "")
    thread.join(TIMEOUT_S)
    assert entered == ["leaver"] and group.get(_utils._TOKEN) == b""


def test_a_worker_that_waits_to_leave_does_so_when_the_store_ends():
    store, group = store_with_holder()
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=10))
    thread, entered = wait_to_leave(client)
    assert not entered
    del store, group
    thread.join(TIMEOUT_S)  # a leaver that waited for the token would get an error when the store's time-out has passed
    assert entered == ["leaver"]


def test_the_holder_of_the_token_is_named():
    _, group = store_with_holder()
    group.set_timeout(timedelta(seconds=0.1))
    with (
        pytest.raises(RuntimeError, match=r"joiner, to join the group, waited 0\.1 s for the token held by holder"),
        _utils._group_membership_management(group, "joiner", True),
    ):
        pass
    group.set_timeout(timedelta(seconds=TIMEOUT_S))
    assert group.get(_utils._TOKEN) == b"holder"
