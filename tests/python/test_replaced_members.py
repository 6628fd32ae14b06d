"""A lost worker of a group of fixed size is started again, and takes its place; callbacks tell the others."""

import contextlib
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from member_processes import Members, RemoteFailure, leave
from waiting import eventually, remains

import torchrpc
import torchrpc.rpc as rpc
from torchrpc import keygen
from torchrpc.rpc._group import gather as gathering
from torchrpc.testing import free_port

STORE = """
import sys, time, datetime
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, True, datetime.timedelta(seconds=60), wait_for_workers=False)
print("serves", flush=True)
sys.stdin.read()
"""


class StoreProcess:
    """Serves a TCPStore, as torchrun's agent does."""

    def __init__(self):
        self.port = free_port()
        self.process = subprocess.Popen(
            [sys.executable, "-c", STORE, str(self.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "serves\n"

    def environment(self):
        return {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=["tcp", "file"])
def members_of(request, tmp_path):
    """A function that makes Members whose store is served by rank 0, or is a file."""
    made = []

    def make(size, **options):
        url = f"tcp://127.0.0.1:{free_port()}" if request.param == "tcp" else f"file://{tmp_path}/store"
        made.append(Members(size, url, **options))
        return made[-1]

    yield make
    for members in made:
        members.__exit__()


@pytest.fixture
def members_by_file(tmp_path):
    made = []

    def make(size, **options):
        made.append(Members(size, f"file://{tmp_path}/store", **options))
        return made[-1]

    yield make
    for members in made:
        members.__exit__()


# --- functions that run in the workers ---


def pids_of_all():
    return [rpc.rpc_sync(info.name, os.getpid) for info in rpc.get_worker_infos()]


def call_until_lost(name):
    try:
        rpc.rpc_sync(name, time.sleep, args=(60,))
    except rpc.WorkerLostError as error:
        return error.worker
    return None


held = {}


def hold(name):
    held[name] = rpc.remote(name, torch.ones, args=((2,),))
    value = held[name].to_here().tolist()
    eventually(held[name].confirmed_by_owner)  # the value may arrive before the answer of the call that makes it
    return value


def use_for(seconds, name):
    """The values of new references again and again; all that differ from the first one."""
    first = hold(name)
    wrong = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (seen := use_held(name)) != first:
            wrong.append(seen)
        time.sleep(0.01)  # leaves the processor to the members that start
    return wrong


def use_held(name):
    try:
        return held[name].to_here().tolist()
    except rpc.WorkerLostError as error:
        return str(error)


@torchrpc.restorable
def make_value(number, tensor):
    return {"number": number, "tensor": tensor + number, "pid": os.getpid()}


def keep(rref):
    held["kept"] = rref


def make_restorable(owner, third):
    tensor = torch.ones(2)
    held["made"] = rpc.remote(owner, make_value, args=(7, tensor))
    held["made"].to_here()
    tensor.zero_()  # the call is repeated with the arguments that it had
    rpc.rpc_sync(third, keep, args=(held["made"],))


def value_of(key, pid):
    """The value that the process `pid` has made."""

    def is_restored():
        try:
            return held[key].to_here(timeout=20)["pid"] == pid
        except rpc.WorkerLostError as error:
            assert "makes it again" in str(error) or "lost" in str(error)
            return False

    eventually(is_restored, 20)
    value = held[key].to_here()
    return value["number"], value["tensor"].tolist(), rpc.rpc_sync(held[key].owner(), os.getpid) == pid


def send_held(key, to):
    return rpc.rpc_sync(to, number_in, args=(held[key],))


def number_in(rref):
    return rref.to_here()["number"]


def drop_held():
    held.clear()


def values_owned():
    return int(rpc.api._get_current_rpc_agent().get_metrics()["rref.owned"])


def gather(value):
    return rpc.api._all_gather(value)


def look_for_lost_workers_every(seconds):
    """A gathering goes on without a worker that has been lost for half a second; a busy machine starts none so soon."""
    gathering._LOST_POLL_S = seconds


def call_all_for(seconds):
    """Call all others again and again; return how many calls were right, and how many failed for which worker."""
    me = rpc.get_worker_info().name
    names = [info.name for info in rpc.get_worker_infos() if info.name != me]
    right, failed, wrong = 0, {}, []
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        number += 1
        for name in names:
            try:
                value = rpc.rpc_sync(name, torch.add, args=(torch.full((3,), number), 1), timeout=20)
                right += 1
                if value.tolist() != [number + 1] * 3:
                    wrong.append(value.tolist())
            except rpc.WorkerLostError as error:
                failed[error.worker] = failed.get(error.worker, 0) + 1
                time.sleep(0.01)  # leaves the processor to the member that starts
    return right, failed, wrong


changes = []


def record_changes():
    torchrpc.on_member_change(lambda worker, change: changes.append((worker.name, change)))


def first_changes(count):
    """The callback runs after the list of living workers has changed."""
    eventually(lambda: len(changes) >= count)
    return changes


def await_connections(count):
    eventually(lambda: int(rpc._get_debug_info()["agent.num_connections"]) >= count)


def living():
    return [info.name for info in rpc.get_workers()]


def await_living(names):
    eventually(lambda: living() == names, 30)


# --- the tests ---


def test_a_killed_worker_is_replaced_under_its_name_and_rank(members_of):
    members = members_of(4)
    members.start()
    first = members.each(pids_of_all)
    assert first == [first[0]] * 4
    for rank in (0, 1, 2):
        members[rank].begin(call_until_lost, "worker3")
    time.sleep(0.5)  # worker3 is killed while it serves the calls
    members[3].kill()
    assert [members[rank].result() for rank in (0, 1, 2)] == ["worker3"] * 3
    members.start(3)
    assert members.each(pids_of_all) == [[*first[0][:3], members[3].pid]] * 4
    assert members.each(gather, 1) == [{f"worker{rank}": 1 for rank in range(4)}] * 4
    members.each(leave)


def test_it_is_replaced_before_others_have_noticed_its_end(members_by_file):
    """Nobody has called it, so nobody had a connection to it."""
    members = members_by_file(3)
    members.start()
    members[2].kill()
    members.start(2)
    assert members.each(pids_of_all) == [[members[rank].pid for rank in range(3)]] * 3
    members.each(leave)


def test_a_worker_is_replaced_again_and_again(members_by_file):
    members = members_by_file(3)
    members.start()
    for _ in range(3):
        members[0].run(pids_of_all)
        members[2].kill()
        members.start(2)
        assert members.each(pids_of_all) == [[members[rank].pid for rank in range(3)]] * 3
    members.each(leave)


def test_two_are_replaced_at_the_same_time(members_by_file):
    members = members_by_file(4)
    members.start()
    members.each(pids_of_all)
    members[2].kill()
    members[3].kill()
    members.start(2, 3)
    assert members.each(pids_of_all) == [[members[rank].pid for rank in range(4)]] * 4
    members.each(leave)


def test_references_of_a_replaced_worker_to_one_that_was_replaced_after_it_stay(members_by_file):
    """The first one announces itself again and again to the second, which has found it in the store."""
    members = members_by_file(3)
    members.start()
    members.each(pids_of_all)
    members[1].kill()
    members[2].kill()
    members.start(2)
    time.sleep(2)  # it announces itself 3 and 6 s after its start, too
    members.start(1)
    assert members[2].run(use_for, 5, "worker1") == []
    members.each(leave)


def test_what_the_former_process_owned_is_lost_and_says_so(members_by_file):
    members = members_by_file(2)
    members.start()
    assert members[0].run(hold, "worker1") == [1, 1]
    members[1].kill()
    members.start(1)
    text = members[0].run(use_held, "worker1")
    assert "lost with its owner" in text and "worker1" in text and "started again" in text
    assert members[0].run(hold, "worker1") == [1, 1]
    assert members[0].run(use_held, "worker1") == [1, 1]
    members.each(leave)


def test_a_restorable_value_is_made_again_for_all_that_hold_it(members_by_file):
    members = members_by_file(3)
    members.start()
    members[0].run(make_restorable, "worker1", "worker2")
    for _ in range(2):
        members[1].kill()
        members.start(1)
        assert members[0].run(value_of, "made", members[1].pid) == (7, [8, 8], True)
        assert members[2].run(value_of, "kept", members[1].pid) == (7, [8, 8], True)
    assert members[2].run(send_held, "kept", "worker0") == 7
    assert members[2].run(send_held, "kept", "worker1") == 7
    assert members[1].run(values_owned) == 1
    members[0].run(drop_held)
    members[2].run(drop_held)
    eventually(lambda: members[1].run(values_owned) == 0, 20)
    members.each(leave)


def test_a_restorable_function_takes_no_rrefs(members_by_file):
    members = members_by_file(2)
    members.start()
    with pytest.raises(RemoteFailure, match="arguments of a restorable function contain an RRef"):
        members[0].run(give_rref_to_restorable)
    with pytest.raises(TypeError, match="restorable takes a Python function or class"):
        torchrpc.restorable(len)
    members.each(leave)


def give_rref_to_restorable():
    rpc.remote("worker1", make_value, args=(1, rpc.RRef(torch.ones(1))))


def test_the_place_of_a_living_worker_is_refused(members_by_file):
    members = members_by_file(2)
    members.start()
    former = members[1]
    with pytest.raises(RemoteFailure, match=r"RendezvousError: rank 1 is taken: .*worker1.* is alive"):
        members.start(1)
    members.workers[1] = former
    assert members.each(pids_of_all) == [[members[0].pid, former.pid]] * 2
    members.each(leave)


def test_others_call_on_while_workers_are_killed_and_replaced(members_by_file):
    members = members_by_file(4)
    members.start()
    for rank in (0, 1):
        members[rank].begin(call_all_for, 8)
    for rank in (2, 3, 2):
        time.sleep(0.7)  # the others call meanwhile
        members[rank].kill()
        members.start(rank)
    for rank in (0, 1):
        right, failed, wrong = members[rank].result()
        assert wrong == []
        assert right > 100
        assert set(failed) <= {"worker2", "worker3"}
    assert members.each(pids_of_all) == [[members[rank].pid for rank in range(4)]] * 4
    members.each(leave)


def test_a_worker_that_is_killed_and_replaced_while_the_others_shut_down_is_waited_for(members_of):
    members = members_of(4)
    members.start()
    members.each(pids_of_all)
    members.each(gather, 1)
    members.each(look_for_lost_workers_every, 20)
    for rank in (0, 1, 2):
        members[rank].begin(leave)
    remains(lambda: not any(members[rank].has_result() for rank in (0, 1, 2)), 1)
    members.prepare(3)
    members[3].kill()
    members.start(3)
    remains(lambda: not any(members[rank].has_result() for rank in (0, 1, 2)), 1)
    members[3].run(leave)
    for rank in (0, 1, 2):
        members[rank].result()


def test_the_leader_of_a_gathering_may_be_replaced_while_the_others_wait(members_by_file):
    members = members_by_file(3)
    members.start()
    members.each(gather, 1)
    members.each(look_for_lost_workers_every, 8)
    for rank in (1, 2):
        members[rank].begin(gather, 2)
    remains(lambda: not any(members[rank].has_result() for rank in (1, 2)), 1)
    members.prepare(0)
    members[0].kill()
    members.start(0)
    assert members[0].run(gather, 2) == {f"worker{rank}": 2 for rank in range(3)}
    for rank in (1, 2):
        assert members[rank].result() == {f"worker{rank}": 2 for rank in range(3)}
    members.each(leave)


def test_changes_of_members_are_reported(members_by_file):
    members = members_by_file(3)
    for rank in range(3):
        members.begin(rank)
    for rank in range(3):
        members[rank].result()
    members[0].run(record_changes)
    assert members[0].run(living) == ["worker0", "worker1", "worker2"]
    members[0].run(await_connections, 2)  # none of the workers has been called
    members[2].kill()
    members[0].run(await_living, ["worker0", "worker1"])
    members.start(2)
    members[0].run(await_living, ["worker0", "worker1", "worker2"])
    members[1].run(leave, False)
    members[0].run(await_living, ["worker0", "worker2"])
    assert members[0].run(first_changes, 3) == [("worker2", "lost"), ("worker2", "replaced"), ("worker1", "left")]


def test_a_callback_that_raises_is_reported_and_does_no_harm(caplog):
    from torchrpc.rpc._group import members

    seen = []

    def fail(worker, change):
        raise ValueError("on purpose")

    removes = [torchrpc.on_member_change(fail), torchrpc.on_member_change(lambda *change: seen.append(change))]
    try:
        members._report(rpc.WorkerInfo("w", 1), "lost")
        assert [(worker.name, change) for worker, change in seen] == [("w", "lost")]
        assert "on purpose" in caplog.text and "w was lost" in caplog.text
    finally:
        for remove in removes:
            remove()
    with pytest.raises(TypeError, match="callback must be callable"):
        torchrpc.on_member_change(None)


@pytest.mark.parametrize("kind", ["secret", "identity"])
def test_with_secrets_identities_and_encryption(members_by_file, tmp_path, kind):
    options = {"secret": "0123456789abcdef0123"} if kind == "secret" else {}
    members = members_by_file(3, encryption="on", **options)
    if kind == "identity":
        names = [f"worker{rank}" for rank in range(3)]
        keygen.main([str(tmp_path / "group.key"), "--member", *names, "--folder", str(tmp_path)])

    def begin(rank):
        chosen = {"identity": str(tmp_path / f"worker{rank}.identity")} if kind == "identity" else {}
        return members.begin(rank, **chosen)

    for worker in [begin(rank) for rank in range(3)]:
        worker.result()
    members.each(pids_of_all)
    members[1].kill()
    begin(1).result()
    assert members.each(pids_of_all) == [[members[rank].pid for rank in range(3)]] * 3
    members.each(leave)


def test_rank_0_is_replaced_where_another_process_serves_the_store():
    with StoreProcess() as store, Members(3, "env://") as members:
        members.environment |= store.environment()
        members.start()
        members.each(pids_of_all)
        members[0].kill()
        members.start(0)
        assert members.each(pids_of_all) == [[members[rank].pid for rank in range(3)]] * 3
        assert members.each(gather, 5) == [{f"worker{rank}": 5 for rank in range(3)}] * 3
        members.each(leave)


def test_rank_0_is_replaced_and_serves_the_store_again():
    with Members(4, f"tcp://127.0.0.1:{free_port()}") as members:
        members.start()
        members.each(pids_of_all)
        for _ in range(2):
            members[0].kill()
            members.start(0)
            assert members.each(pids_of_all) == [[members[rank].pid for rank in range(4)]] * 4
        members[2].kill()
        members.start(2)
        assert members.each(pids_of_all) == [[members[rank].pid for rank in range(4)]] * 4
        assert members.each(gather, 5) == [{f"worker{rank}": 5 for rank in range(4)}] * 4
        members.each(leave)


def test_another_worker_that_starts_before_rank_0_is_back_is_replaced_after_it():
    with Members(3, f"tcp://127.0.0.1:{free_port()}") as members:
        members.start()
        members.each(pids_of_all)
        members[0].kill()
        members[2].kill()
        later = members.begin(2)
        remains(lambda: not later.has_result(), 1)
        members.start(0)
        later.result()
        assert members.each(pids_of_all) == [[members[rank].pid for rank in range(3)]] * 3
        members.each(leave)


def test_when_all_have_died_a_new_group_forms():
    with StoreProcess() as store, Members(2, "env://") as members:
        members.environment |= store.environment()
        for _ in range(3):
            members.start()
            assert members.each(pids_of_all) == [[members[rank].pid for rank in range(2)]] * 2
            for rank in range(2):
                members[rank].kill()


def leave_and_join_again(size, url):
    rpc.shutdown(graceful=False)
    name, rank = f"worker{os.environ['RANK']}", int(os.environ["RANK"])
    options = rpc.TensorPipeRpcBackendOptions(init_method=url)
    rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
    return pids_of_all()


def test_a_process_that_has_left_begins_the_next_group_with_the_others(members_by_file):
    members = members_by_file(2)
    members.start()
    members[0].begin(leave_and_join_again, 2, members.url)
    remains(lambda: not members[0].has_result(), 1)  # it waits for worker1
    assert members[1].run(leave_and_join_again, 2, members.url) == members[0].result()
    members.each(leave)


def test_many_restarts_are_watched_by_threads_that_call_all_the_time(members_by_file):
    """Callbacks, calls and restarts at the same time, in this process."""
    members = members_by_file(3)
    for rank in (1, 2):
        members.begin(rank)
    seen = []
    remove = torchrpc.on_member_change(lambda worker, change: seen.append((worker.name, change)))
    options = rpc.TensorPipeRpcBackendOptions(init_method=members.url)
    rpc.init_rpc("worker0", rank=0, world_size=3, rpc_backend_options=options)
    stop = threading.Event()
    unexpected = []

    def call():
        while not stop.is_set():
            try:
                rpc.rpc_sync("worker1", torch.add, args=(1, 2), timeout=20)
                rpc.rpc_sync("worker2", torch.add, args=(1, 2), timeout=20)
            except rpc.WorkerLostError as error:
                if error.worker != "worker2":
                    unexpected.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    try:
        for rank in (1, 2):
            members[rank].result()
        for thread in threads:
            thread.start()
        for _ in range(4):
            members[2].kill()
            members.start(2)
            assert rpc.rpc_sync("worker2", os.getpid) == members[2].pid
        stop.set()
        for thread in threads:
            thread.join()
        assert unexpected == []
        eventually(lambda: seen.count(("worker2", "replaced")) >= 4)  # callbacks run on a thread of their own
        assert seen.count(("worker2", "replaced")) == 4
        # "joined": a last frame of a killed process, over its other connection, has arrived when one had broken.
        assert {change for _, change in seen} <= {"lost", "joined", "replaced"}
        for rank in (1, 2):
            members[rank].begin(leave)
        rpc.shutdown()
    finally:
        stop.set()
        remove()
        with contextlib.suppress(rpc.ShutdownError):  # the test has done it
            rpc.shutdown(graceful=False)
