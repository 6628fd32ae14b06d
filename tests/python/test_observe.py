"""Looking into a running group: from its store, from a process id, as a member; and who may not."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from member_processes import Members, RemoteFailure, WorkerProcess
from waiting import eventually, stop

import torchrpc.rpc as rpc
from torchrpc import _C, keygen, observe
from torchrpc.testing import free_port

SECRET = "0123456789abcdef0123456789abcdef"
TIMEOUT_S = 20.0


gate = threading.Event()


def wait_at_gate():
    gate.wait()


def open_gate():
    gate.set()


def call_slowly(to):
    return rpc.rpc_sync(to, wait_at_gate, timeout=0)


@rpc.functions.async_execution
def call_later(to):
    return rpc.rpc_async(to, wait_at_gate, timeout=0)


def attach_here(name):
    with observe.attach() as group:
        return group.report(name)


def hold_rrefs(to, count):
    global held
    held = [rpc.remote(to, torch.add, args=(torch.ones(2), 1)) for _ in range(count)]
    for each in held:
        each.to_here()


def line_of(report, tid):
    """The innermost line of this file where a thread is."""
    (thread,) = [each for each in report["threads"] if each["tid"] == tid]
    return next((f"{row['function']}" for row in thread["python"] if row["file"] == __file__), None)


@pytest.fixture
def group():
    port = free_port()
    with Members(3, f"tcp://127.0.0.1:{port}") as members:
        members.start(0, 1, 2)
        members.port = port
        yield members


def attach_to(members, way):
    if way == "pid":
        return observe.attach(pid=members[1].pid)
    return observe.attach(f"127.0.0.1:{members.port}")


@pytest.mark.parametrize("way", ["store", "pid"])
def test_a_chain_of_calls_is_seen_with_its_lines(group, way):
    group[0].begin(call_slowly, "worker1")
    with attach_to(group, way) as view:
        assert [each.name for each in view.members] == ["worker0", "worker1", "worker2"]

        def is_in_the_function():  # the worker imports this module first
            report = view.report("worker1", stacks=True, timeout=TIMEOUT_S)
            return [line_of(report, each["tid"]) for each in report["calls_in"]] == ["wait_at_gate"]

        eventually(is_in_the_function)
        begin = time.monotonic()
        reports = view.reports(stacks=True, timeout=TIMEOUT_S)
        took_s = time.monotonic() - begin  # the two reports were made at most so long after each other
        (made,) = reports["worker0"]["calls_out"]
        (served,) = reports["worker1"]["calls_in"]
        assert (made["to"], made["call"], made["left_s"]) == ("worker1", served["call"], None)
        assert (served["from"], served["state"]) == ("worker0", "running")
        assert served["function"].endswith("test_observe.wait_at_gate")
        assert made["age_s"] >= served["age_s"] - took_s and served["age_s"] >= 0
        assert line_of(reports["worker0"], made["tid"]) == "call_slowly"
        (waiting,) = [each for each in reports["worker0"]["threads"] if each["tid"] == made["tid"]]
        assert waiting["waits"]["kind"] == "reply"
        assert (waiting["waits"]["to"], waiting["waits"]["call"]) == ("worker1", made["call"])
        group[1].run(open_gate)
        group[0].result()
        eventually(lambda: not view.report("worker1")["calls_in"])
        assert not view.report("worker0")["calls_out"]


def test_the_call_of_a_function_that_returns_a_future_waits_without_a_thread(group):
    group[0].begin(rpc.rpc_sync, "worker1", call_later, ("worker2",), None, 0)
    with attach_to(group, "pid") as view:
        eventually(lambda: [each["state"] for each in view.report("worker1")["calls_in"]] == ["waiting"])
        (served,) = view.report("worker1")["calls_in"]
        assert served["function"].endswith("call_later") and served["tid"] == 0
        group[2].run(open_gate)
        group[0].result()
        eventually(lambda: not view.report("worker1")["calls_in"])


def test_a_member_looks_at_another_over_its_own_connection(group):
    report = group[2].run(attach_here, "worker1")
    assert report["worker"]["name"] == "worker1" and report["worker"]["pid"] == group[1].pid
    assert [each["name"] for each in report["members"]] == ["worker0", "worker1", "worker2"]


def test_rrefs_are_listed_with_their_holders(group):
    group[0].run(hold_rrefs, "worker1", 5)
    with attach_to(group, "pid") as view:
        reports = view.reports(rrefs=True, timeout=TIMEOUT_S)
    owned = [each for each in reports["worker1"]["rrefs"]["list"] if each["is_owner"]]
    held = [each for each in reports["worker0"]["rrefs"]["list"] if not each["is_owner"]]
    assert len(owned) == len(held) == reports["worker1"]["rrefs"]["owned"] == 5
    assert {each["id"] for each in owned} == {each["id"] for each in held}
    assert all(each["holders"] == ["worker0"] and each["type"] == "Tensor" for each in owned)
    assert all(0 <= each["age_s"] < 100 and each["made_by"] == "worker0" for each in owned)


def test_rrefs_say_in_which_line_they_were_made_if_that_is_switched_on():
    with Members(2, f"tcp://127.0.0.1:{free_port()}") as members:
        members.environment["TORCHRPC_RREF_ORIGINS"] = "1"
        members.start(0, 1)
        members[0].run(hold_rrefs, "worker1", 3)
        with observe.attach(pid=members[0].pid) as view:
            rows = view.report("worker0", rrefs=True, timeout=TIMEOUT_S)["rrefs"]["list"]
    line = hold_rrefs.__code__.co_firstlineno + 2
    assert [each["made_at"] for each in rows] == [f"{__file__}:{line}"] * 3


def test_a_stopped_worker_does_not_keep_the_answers_of_the_others(group):
    with attach_to(group, "store") as view:
        stop(group[2].pid)
        try:
            reports = view.reports(timeout=5.0)
        finally:
            os.kill(group[2].pid, signal.SIGCONT)
    assert isinstance(reports["worker2"], rpc.RpcTimeoutError) and "worker2" in str(reports["worker2"])
    assert reports["worker0"]["worker"]["name"] == "worker0"


def test_many_questions_at_once_are_answered_or_refused_and_the_worker_goes_on(group):
    with attach_to(group, "pid") as view:
        answers, refusals = [], []

        def ask():
            for _ in range(20):
                try:
                    answers.append(view.report("worker1", stacks=True, timeout=TIMEOUT_S)["worker"]["name"])
                except rpc.RpcError as refused:
                    refusals.append(str(refused))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answers) + len(refusals) == 160 and set(answers) == {"worker1"}
        assert all("too many questions" in each for each in refusals)
    assert group[0].run(rpc.rpc_sync, "worker1", torch.add, (torch.ones(2), 1)).tolist() == [2.0, 2.0]


def leave_and_wait():
    rpc.shutdown(graceful=False)
    return os.getpid()


def test_what_is_no_worker_is_said(group):
    pid = group[2].run(leave_and_wait)
    with pytest.raises(ValueError, match="is no worker"):
        observe.attach(pid=pid)
    with pytest.raises(ValueError, match="is no worker"), subprocess.Popen(["sleep", "60"]) as other:
        try:
            observe.attach(pid=other.pid)
        finally:
            other.kill()
    with pytest.raises(ValueError, match="there is no process"):
        observe.attach(pid=2**22 - 1)
    with pytest.raises(ValueError, match="not an address"):
        observe.attach("somewhere")
    with pytest.raises(ValueError, match="not both"):
        observe.attach("localhost:1", pid=1)


@pytest.fixture
def secret_group(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    with Members(2, f"tcp://127.0.0.1:{free_port()}", secret=SECRET) as members:
        members.start(0, 1)
        yield members, secret


def test_a_group_with_a_secret_shows_itself_to_those_who_have_it(secret_group, tmp_path):
    members, secret = secret_group
    with pytest.raises(ValueError, match="was given a secret"):
        observe.attach(pid=members[1].pid)
    with observe.attach(pid=members[1].pid, secret_file=secret) as view:
        assert view.report("worker0")["worker"]["name"] == "worker0"
    wrong = tmp_path / "wrong"
    wrong.write_text(SECRET[::-1])
    with pytest.raises(ValueError, match="run chmod 600"):
        observe.attach(pid=members[1].pid, secret_file=wrong, timeout=3.0)
    wrong.chmod(0o600)
    with pytest.raises(rpc.RpcError):
        observe.attach(pid=members[1].pid, secret_file=wrong, timeout=3.0)
    assert SECRET not in (os.fsdecode(read_card(members[1].pid)))


def card_of(pid):
    """Return the path of the worker's card."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # the worker has closed it meanwhile
            if _C._WORKER_CARD in os.readlink(f"/proc/{pid}/fd/{name}"):
                return f"/proc/{pid}/fd/{name}"
    raise AssertionError("no card")


def read_card(pid):
    with open(card_of(pid), "rb") as card:
        return card.read()


FORGED = """
import os, socket, sys
name = sys.argv[2]
if sys.argv[1] == "large":
    os.truncate(os.memfd_create(name), 6 << 30)
elif sys.argv[1] == "not text":
    os.write(os.memfd_create(name), bytes(range(256)))
elif sys.argv[1] == "incomplete":
    os.write(os.memfd_create(name), b"name evil\\nsecret 00\\n")
elif sys.argv[1] == "another user's":
    os.write(made := os.memfd_create(name), CARD.encode())
    os.fchown(made, 12345, -1)
print(flush=True)
sys.stdin.read()
"""
CARD = "name worker\naddress a\ntransport tcp\nencryption on\nneeds_secret 0\nsecret 00\n"


@pytest.mark.parametrize("kind", ["large", "not text", "incomplete", "another user's"])
def test_a_forged_card_is_not_read(kind):
    if kind == "another user's" and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    program = f"CARD = {CARD!r}\n{FORGED}"
    command = [sys.executable, "-c", program, kind, _C._WORKER_CARD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(ValueError, match="is no worker"):
            observe.attach(pid=process.pid)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
        process.stdin.close()


def test_the_card_cannot_be_changed_by_those_who_read_it(group):
    pid = group[1].pid
    before = read_card(pid)
    with pytest.raises(OSError), open(card_of(pid), "r+b", buffering=0) as card:
        card.write(b"x")
    assert read_card(pid) == before


@contextlib.contextmanager
def two_processes():
    processes = [WorkerProcess({"TORCHRPC_INIT_TIMEOUT": "10"}) for _ in range(2)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


def join_with_identity(rank, url, folder, names):
    rpc.init_rpc(
        names[rank],
        rank=rank,
        world_size=2,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=url, identity=folder / f"{names[rank]}.identity"
        ),
    )
    return os.getpid()


def test_of_identities_members_and_observers_may_look_and_clients_may_not(tmp_path):
    names = ["trainer-0", "client-7"]
    with contextlib.redirect_stdout(None):
        names_of_roles = ["--member", "trainer-0", "--client", "client-7", "--observer", "ops"]
        keygen.main([str(tmp_path / "group.key"), *names_of_roles, "--folder", str(tmp_path)])
    url = f"tcp://127.0.0.1:{free_port()}"
    with two_processes() as members:
        for rank in (0, 1):
            members[rank].begin(join_with_identity, rank, url, tmp_path, names)
        pid = members[0].result()
        members[1].result()
        for name in ("trainer-0", "ops"):
            with observe.attach(pid=pid, identity=str(tmp_path / f"{name}.identity")) as view:
                assert view.report("trainer-0")["worker"]["name"] == "trainer-0"
        with pytest.raises(
            rpc.NotAllowedError, match="client-7 inspect it: give it an identity with the role observer"
        ):
            observe.attach(pid=pid, identity=str(tmp_path / "client-7.identity"))
        # Nor over the connection that the client has as a worker.
        with pytest.raises(RemoteFailure, match=r"NotAllowedError.*which is a client"):
            members[1].run(attach_here, "trainer-0")


def join_as_observer(url, folder):
    try:
        rpc.init_rpc(
            "ops",
            rank=1,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=url, identity=folder / "ops.identity"),
        )
        return str(rpc.rpc_sync("trainer-0", torch.add, args=(torch.ones(2), 1), timeout=5))
    except rpc.RpcError as refused:
        return f"{type(refused).__name__}"


def grow(url, folder):
    rpc.init_rpc(
        "trainer-0",
        rank=0,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=url, identity=folder / "trainer-0.identity"),
    )


def test_an_observer_cannot_join_and_call(tmp_path):
    with contextlib.redirect_stdout(None):
        keygen.main(
            [str(tmp_path / "group.key"), "--member", "trainer-0", "--observer", "ops", "--folder", str(tmp_path)]
        )
    url = f"tcp://127.0.0.1:{free_port()}"
    with two_processes() as members:
        members[0].run(grow, url, tmp_path)
        outcome = members[1].run(join_as_observer, url, tmp_path)
        assert "Error" in outcome, outcome
