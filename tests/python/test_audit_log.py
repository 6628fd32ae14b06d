"""The audit log: what a worker has served and refused, for whom."""

import dataclasses
import json
import logging
import os
import stat
import threading

import pytest
import torch
from waiting import eventually

import torchrpc.rpc as rpc
from torchrpc.rpc import Quota
from torchrpc.testing import workers

events = []


def length(value):
    return len(value)


def fail():
    raise ValueError("it failed")


def unlisted():
    return None


@dataclasses.dataclass
class Order:
    owner: str


def owner_of(value):
    return value.owner


@rpc.functions.async_execution
def later(value):
    return rpc.rpc_async("worker0", length, args=(value,))


def record(event):
    events.append(event)


def raise_always(event):
    raise ValueError("broken log")


def recorded_here():
    return events


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def from_worker0(path):
    return [event for event in lines_of(path) if (event["worker"], event["caller"]) == ("worker1", "unproved: worker0")]


def served(path, name):
    return [event for event in from_worker0(path) if event.get("function", "").endswith(name)]


def test_each_call_is_a_line_with_its_caller_function_and_outcome(tmp_path):
    path = tmp_path / "audit.log"
    with workers(2, audit_log=path):
        rpc.rpc_sync("worker1", length, args=("x" * 1000,))
        with pytest.raises(ValueError, match="it failed"):
            rpc.rpc_sync("worker1", fail)
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))
        rref = rpc.remote("worker1", length, args=("abc",))
        assert rref.to_here() == 3
        with pytest.raises(ValueError, match="it failed"):
            rpc.remote("worker1", fail).to_here()
        rpc.rpc_sync("worker1", later, args=("abc",))
    (call, remote) = served(path, "test_audit_log.length")
    assert call["action"] == "call" and call["outcome"] == "ok" and "error" not in call
    assert 1000 < call["request_bytes"] < 3000 and 0 < call["reply_bytes"] < 1000 and 0 <= call["seconds"] < 60
    assert call["time"].endswith("Z") and call["time"].startswith("20")
    assert remote["action"] == "remote" and remote["outcome"] == "ok"
    failed = served(path, "fail")
    assert [event["action"] for event in failed] == ["call", "remote"]
    assert all(event["outcome"] == "error" and "it failed" in event["reason"] for event in failed)
    assert len(served(path, "aten::add")) == 1
    assert len(served(path, "later")) == 1
    assert any(event["action"] == "fetch" for event in from_worker0(path))
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_what_a_list_or_a_quota_refuses_is_recorded_as_refused(tmp_path):
    path = tmp_path / "audit.log"
    with workers(2, audit_log=str(path), allowed_functions=[length], quotas={"*": Quota(bytes=1 << 16)}):
        assert rpc.rpc_sync("worker1", length, args=("abc",)) == 3
        with pytest.raises(rpc.NotAllowedError):
            rpc.rpc_sync("worker1", unlisted)
        with pytest.raises(rpc.NotAllowedError):
            rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))
        with pytest.raises(rpc.QuotaExceededError):
            rpc.rpc_sync("worker1", length, args=("x" * (1 << 17),))
    refused = [event for event in from_worker0(path) if event["outcome"] == "refused"]
    assert [event["error"] for event in refused] == ["not allowed", "not allowed", "quota exceeded"]
    assert "unlisted" in refused[0]["reason"] and refused[1]["function"] == "aten::add"
    assert len(served(path, "length")) == 1


def test_what_runs_while_arguments_are_read_is_in_the_line_of_the_call(tmp_path):
    path = tmp_path / "audit.log"
    with workers(2, audit_log=path, allowed_functions=[owner_of, Order]):
        assert rpc.rpc_sync("worker1", owner_of, args=(Order("me"),)) == "me"
        assert rpc.rpc_sync("worker1", owner_of, args=(Order("you"),)) == "you"
    assert [call["also_ran"] for call in served(path, "owner_of")] == [["test_audit_log.Order"]] * 2


class Account:
    def deposit(self, amount):
        return amount


def test_a_method_is_recorded_with_its_class(tmp_path):
    path = tmp_path / "audit.log"
    with workers(2, audit_log=path):
        account = rpc.remote("worker1", Account)
        assert account.rpc_sync().deposit(2) == 2
        with pytest.raises(AttributeError):
            account.rpc_sync().withdraw()
    assert [event["outcome"] for event in served(path, "test_audit_log.Account.deposit")] == ["ok"]
    assert [event["outcome"] for event in served(path, "test_audit_log.Account.withdraw")] == ["error"]


def test_a_function_gets_a_dict_for_each_event():
    with workers(2, audit_log=record):
        rpc.rpc_sync("worker1", length, args=("abc",))
        eventually(
            lambda: any(e.get("function", "").endswith("length") for e in rpc.rpc_sync("worker1", recorded_here))
        )


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def call_worker0(function, *args):
    return rpc.rpc_sync("worker0", function, args=args)


def test_a_logger_gets_lines_of_json():
    logger = logging.getLogger("test_audit_log")
    logger.setLevel(logging.INFO)
    handler = Lines()
    logger.addHandler(handler)
    try:
        with workers(2, audit_log=logger):
            rpc.rpc_sync("worker1", call_worker0, args=(length, "abc"))
        (event,) = [e for e in map(json.loads, handler.lines) if e.get("function", "").endswith("length")]
        assert (event["worker"], event["caller"]) == ("worker0", "unproved: worker1")
    finally:
        logger.removeHandler(handler)


def test_a_function_that_raises_costs_its_events_only():
    with workers(2, audit_log=raise_always):
        for _ in range(3):
            assert rpc.rpc_sync("worker1", length, args=("abc",)) == 3
        dropped = "agent.dropped_audit_events"
        eventually(lambda: int(rpc.rpc_sync("worker1", rpc._get_debug_info)[dropped]) >= 3)


may_go_on = threading.Event()
held = []


def hold(event):
    held.append(event)
    may_go_on.wait()


def count_held():
    return len(held)


def release():
    may_go_on.set()


def test_a_slow_function_does_not_hold_up_calls():
    with workers(2, audit_log=hold):
        try:
            for _ in range(300):
                rpc.rpc_sync("worker1", length, args=("abc",))
            eventually(lambda: rpc.rpc_sync("worker1", count_held))
            assert rpc.rpc_sync("worker1", count_held) == 1  # the first event is still being recorded
        finally:
            release()
            rpc.rpc_sync("worker1", release)


def test_a_file_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "link").symlink_to("/dev/null")
    for path in (tmp_path / "link", tmp_path / "missing" / "log"):
        with (
            pytest.raises(RuntimeError, match=f"audit_log: the file {path} cannot be used"),
            workers(1, audit_log=path),
        ):
            pass


def test_an_audit_log_of_another_type_is_refused():
    for bad in (1, b"log", object()):
        with pytest.raises(TypeError, match="audit_log must be the path of a file, a "):
            rpc.TensorPipeRpcBackendOptions(audit_log=bad)
    with pytest.raises(ValueError, match="audit_log must be the path of a file"):
        rpc.TensorPipeRpcBackendOptions(audit_log="")
    assert rpc.TensorPipeRpcBackendOptions().audit_log is None
