"""The exceptions of the package: each can be caught by its name and by torch's, and keeps its type through calls."""

import functools
import os
import pickle
import sys
import threading

import pytest
import torch

import torchrpc
import torchrpc.rpc as rpc
from torchrpc.testing import run_ranks, workers

NAMES = {
    "RpcError": (RuntimeError,),
    "RpcTimeoutError": (rpc.RpcError, TimeoutError),
    "WorkerLostError": (rpc.RpcError,),
    "NotAllowedError": (rpc.RpcError,),
    "QuotaExceededError": (rpc.RpcError,),
    "CancelledError": (rpc.RpcError,),
    "ArgumentMismatchError": (rpc.RpcError, TypeError),
    "NameNotFoundError": (rpc.RpcError,),
    "RemoteException": (rpc.RpcError,),
    "RendezvousError": (rpc.RpcError,),
    "ShutdownError": (rpc.RpcError,),
    "SerializationError": (rpc.RpcError,),
}


@pytest.fixture(scope="module")
def group():
    with workers(2):
        yield


def call_itself(function, *args):
    """Runs on worker1: a nested call, to worker0."""
    return rpc.rpc_sync("worker0", function, args=args)


may_end = threading.Event()


def slow():
    may_end.wait(50)


def let_end():
    may_end.set()


def call_slow():
    return rpc.rpc_sync("worker0", slow, timeout=0.05)


def raise_lost():
    raise rpc.WorkerLostError("worker7 is gone", "worker7")


def return_lock():
    return threading.Lock()


class NotSendableError(Exception):
    pass


class NotSendable:
    def __reduce__(self):
        raise NotSendableError("keep me")


@pytest.mark.parametrize("name", NAMES)
def test_each_is_exported_is_of_upstreams_type_and_can_be_pickled(name):
    kind = getattr(torchrpc, name)
    assert (
        kind is getattr(rpc, name) and issubclass(kind, RuntimeError) and all(issubclass(kind, k) for k in NAMES[name])
    )
    assert name in torchrpc.__all__ and name in rpc.__all__ and kind.__doc__
    back = pickle.loads(pickle.dumps(kind("what happened", "worker1")))
    assert type(back) is kind and str(back) == "what happened" and back.worker == "worker1"


# Before the group begins:


def test_calls_outside_of_a_group_are_a_shutdown_error():
    for call in (lambda: rpc.rpc_sync("worker1", len), rpc.shutdown, lambda: rpc.RRef(1)):
        with pytest.raises(rpc.ShutdownError):
            call()


def test_a_group_that_does_not_form_is_a_rendezvous_error(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHRPC_INIT_TIMEOUT", "0.3")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store")
    with pytest.raises(rpc.RendezvousError, match="missing: rank 1"):
        rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(rpc.RendezvousError, match="MASTER_ADDR") as raised:
        rpc.init_rpc("worker0", rank=0, world_size=2)
    assert isinstance(raised.value, ValueError)


# In the group:


@pytest.mark.parametrize("name", NAMES)
def test_each_keeps_its_type_and_worker_through_a_nested_call(group, name):
    kind = getattr(rpc, name)
    with pytest.raises(kind, match="what happened") as raised:
        rpc.rpc_sync("worker1", call_itself, args=(raise_named, name))
    assert type(raised.value) is kind and raised.value.worker == "worker9"


def raise_named(name):
    raise getattr(rpc, name)("what happened", "worker9")


def test_a_timeout_is_a_timeout_error_wherever_it_is_raised(group):
    with pytest.raises(TimeoutError, match="RPC ran for more than set timeout") as raised:
        rpc.rpc_sync("worker1", slow, timeout=0.05)
    assert type(raised.value) is rpc.RpcTimeoutError and raised.value.worker == "worker1"
    with pytest.raises(rpc.RpcTimeoutError):
        rpc.rpc_async("worker1", slow, timeout=0.05).wait()
    with pytest.raises(rpc.RpcTimeoutError, match="On WorkerInfo"):
        rpc.rpc_sync("worker1", call_slow)
    for name in ("worker0", "worker1"):
        rpc.rpc_sync(name, let_end)


def test_a_worker_that_does_not_exist_is_an_rpc_error(group):
    with pytest.raises(rpc.RpcError, match="could not find destination"):
        rpc.rpc_sync("worker7", len, args=("x",))


def test_what_cannot_be_sent_is_a_serialization_error_and_of_the_type_that_pickle_raised(group):
    with pytest.raises(rpc.SerializationError, match="argument 0") as raised:
        rpc.rpc_sync("worker1", len, args=(threading.Lock(),))
    assert isinstance(raised.value, TypeError)
    with pytest.raises(rpc.SerializationError, match="worker1 cannot send a value of type lock") as raised:
        rpc.rpc_sync("worker1", return_lock)
    assert isinstance(raised.value, TypeError)
    with pytest.raises(rpc.SerializationError, match="keep me") as raised:
        rpc.rpc_sync("worker1", NotSendable)
    assert isinstance(raised.value, NotSendableError)
    with pytest.raises(rpc.SerializationError, match="C\\+\\+ function"):
        rpc.rpc_sync("worker1", torchrpc.cpp_function("f"), args=(object(),))


def test_the_captured_variable_that_cannot_be_sent_is_named(group):
    lock, ok = threading.Lock(), 5

    def inner():
        return lock, ok

    for function in (lambda: (ok, lock), lambda: inner()):
        with pytest.raises(rpc.SerializationError, match=r"because of the variable 'lock' of .* \(a lock\)") as raised:
            rpc.rpc_sync("worker1", function)
        assert "cannot pickle '_thread.lock' object" in str(raised.value) and "Nothing was sent" in str(raised.value)
    with pytest.raises(rpc.SerializationError, match=r"argument 1, because of a default of a parameter of .*<lambda>"):
        rpc.rpc_sync("worker1", functools.reduce, args=(1, lambda x=lock: x))


def test_a_name_that_the_callee_lacks_is_a_name_not_found_error(group, monkeypatch):
    def only_here():
        pass

    only_here.__qualname__ = "only_here"
    monkeypatch.setattr(sys.modules[__name__], "only_here", only_here, raising=False)
    with pytest.raises(rpc.NameNotFoundError, match="worker1 has no"):
        rpc.rpc_sync("worker1", only_here)
    with pytest.raises(rpc.NameNotFoundError, match=r"no C\+\+ function named nothing"):
        rpc.rpc_sync("worker1", torchrpc.cpp_function("nothing"))


def refused_by_allow_list(rank):
    """Each kind of function that a caller can name, on a worker that allows none of them."""
    from test_error_types import call_itself

    kinds = []
    options = rpc.TensorPipeRpcBackendOptions(init_method=os.environ["STORE"], allowed_functions=["aten::mul"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        for function in (torch.add, torchrpc.cpp_function("f"), call_itself, torch.jit.script(script)):
            try:
                rpc.rpc_sync("worker1", function, args=(torch.ones(1), torch.ones(1)))
            except rpc.NotAllowedError as error:
                kinds.append("allowed_functions" in str(error))
    rpc.shutdown()
    return kinds


def script(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def test_what_the_allow_list_refuses_is_a_not_allowed_error_operators_too(tmp_path):
    env = {"STORE": f"file://{tmp_path}/store"}
    kinds, _ = run_ranks(refused_by_allow_list, 2, start_method="fork", init=False, env=env)
    assert kinds == [True] * 4
