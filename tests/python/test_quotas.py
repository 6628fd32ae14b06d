"""Quotas: what one caller may use of a worker at a time."""

import os
import threading
import time

import pytest
import torch
from waiting import eventually

import torchrpc.rpc as rpc
from torchrpc.rpc import Quota, QuotaExceededError
from torchrpc.testing import workers


def wait_for(path):
    eventually(lambda: os.path.exists(path))
    return threading.get_ident()


def length(value):
    return len(value)


def call_worker1(function, *args):
    return rpc.rpc_sync("worker1", function, args=args)


def test_calls_beyond_the_quota_fail_with_a_named_error_and_other_callers_are_not_affected(tmp_path):
    with workers(3, quotas={"worker0": Quota(calls=2)}):
        waiting = [rpc.rpc_async("worker1", wait_for, args=(str(tmp_path / "go"),)) for _ in range(2)]
        eventually(lambda: rpc.rpc_sync("worker2", call_worker1, args=(length, "abc")) == 3)
        with pytest.raises(
            QuotaExceededError, match=r"worker1 grants worker0 at most 2 calls at a time: .*`calls`"
        ) as e:
            rpc.rpc_sync("worker1", length, args=("abc",))
        assert e.value.worker == "worker1" and isinstance(e.value, rpc.RpcError)
        assert rpc.rpc_sync("worker2", call_worker1, args=(length, "abcd")) == 4
        (tmp_path / "go").touch()
        assert all(future.wait() for future in waiting)
        assert rpc.rpc_sync("worker1", length, args=("abc",)) == 3


def test_a_request_of_more_bytes_than_the_quota_fails_and_the_connection_stays():
    with workers(2, quotas={"worker[0-9]": Quota(bytes=1 << 20)}):
        for value in (torch.ones(1 << 20), "x" * (1 << 21)):
            with pytest.raises(QuotaExceededError, match=r"at most 1048576 bytes of requests .*`bytes`"):
                rpc.rpc_sync("worker1", length, args=(value,))
        assert rpc.rpc_sync("worker1", length, args=(torch.ones(1000),)) == 1000


def test_rrefs_beyond_the_quota_fail_until_earlier_ones_are_deleted():
    with workers(2, quotas={"*": Quota(rrefs=3)}):
        rrefs = [rpc.remote("worker1", length, args=("abc",)) for _ in range(3)]
        assert [rref.to_here() for rref in rrefs] == [3] * 3
        with pytest.raises(QuotaExceededError, match=r"worker1 grants worker0 at most 3 RRefs at a time: .*`rrefs`"):
            rpc.remote("worker1", length, args=("abc",)).to_here()
        assert rpc.rpc_sync("worker1", length, args=("abc",)) == 3
        del rrefs[0]

        def makes_another():
            try:
                return rpc.remote("worker1", length, args=("abcd",)).to_here() == 4
            except RuntimeError:
                return False

        eventually(makes_another)


class Counter:
    def get(self):
        return 1


def outcome(call):
    try:
        return call.wait()
    except rpc.RpcError as error:
        return type(error)


@pytest.mark.parametrize("quota", [Quota(calls=2), Quota(rrefs=2)], ids=["calls", "rrefs"])
def test_calls_of_a_refused_rref_fail_at_once_and_the_group_comes_to_its_end(quota):
    outcomes = set()
    with workers(2, quotas={"worker0": quota}):
        start = time.monotonic()
        for _ in range(5):
            # A call is usually sent before it is known that its RRef was refused, so it may wait for the object. Later
            # it is refused at once. The RRefs are kept, because their deletion would end their calls.
            counters, calls = [], []
            for _ in range(6):
                counters.append(rpc.remote("worker1", Counter))
                try:
                    calls.append(counters[-1].rpc_async(timeout=40).get())
                except QuotaExceededError as error:
                    outcomes.add(type(error))
            outcomes |= {outcome(call) for call in calls}
    assert outcomes <= {1, QuotaExceededError, rpc.RpcError} and outcomes != {1}
    assert time.monotonic() - start < 30


def test_a_group_with_wide_quotas_comes_to_its_end():
    with workers(2, quotas={"*": Quota(calls=100, bytes=1 << 30, rrefs=100, connections=2)}):
        rref = rpc.remote("worker1", length, args=("abc",))
        assert rref.to_here() == 3
        assert rpc._get_debug_info()["agent.refused_by_quota"] == "0"


def test_without_quotas_nothing_is_reported():
    with workers(1):
        assert "agent.refused_by_quota" not in rpc._get_debug_info()


@pytest.mark.parametrize(
    ("quotas", "error", "words"),
    [
        ([("a", Quota())], TypeError, "quotas must be a dict"),
        ({"a": {"calls": 1}}, TypeError, "quotas has 'a'"),
        ({1: Quota()}, TypeError, "quotas has 1"),
        ({"": Quota()}, ValueError, "empty pattern"),
    ],
)
def test_quotas_of_another_form_are_refused(quotas, error, words):
    with pytest.raises(error, match=words):
        rpc.TensorPipeRpcBackendOptions(quotas=quotas)


def test_a_quota_is_made_of_numbers():
    assert Quota() == Quota(calls=None, bytes=None, rrefs=None, connections=None)
    with pytest.raises(TypeError, match=r"Quota\(calls=...\) must be an int"):
        Quota(calls="64")
    with pytest.raises(TypeError, match=r"Quota\(rrefs=...\) must be an int"):
        Quota(rrefs=True)
    with pytest.raises(ValueError, match=r"Quota\(bytes=...\) must not be negative"):
        Quota(bytes=-1)
    options = rpc.TensorPipeRpcBackendOptions(quotas={"client-*": Quota(calls=64)})
    assert options.quotas == {"client-*": Quota(calls=64)}
    assert "quotas={'client-*': Quota(calls=64" in repr(options)
