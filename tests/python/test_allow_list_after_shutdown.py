"""What a worker with `allowed_functions` has received is read under its list, also after its shutdown."""

import pickle

import pytest
from waiting import eventually

import torchrpc.rpc as rpc
from torchrpc import _C
from torchrpc.rpc._security.allow_list import check_method
from torchrpc.rpc._values import exceptions
from torchrpc.testing import run_ranks, workers


def fail():
    raise ValueError("text")


class OwnError(Exception):
    pass


def raise_own_error():
    raise OwnError("mine")


class Thing:
    def method(self):
        pass


called = []


def note_call():
    called.append(1)


class Evil:
    def __reduce__(self):
        return note_call, ()


@pytest.fixture
def future(monkeypatch):
    """Of a call that failed on a worker with a list. Its exception has a class that is not listed, and a pickle."""
    parts = [(__name__, "OwnError")], b"", b"", pickle.dumps(Evil())
    detail = _C._encode_objects(parts, None)
    with workers(1, allowed_functions=[fail]), monkeypatch.context() as patch:
        patch.setattr(exceptions, "_detail_of", lambda exc: detail)
        future = rpc.rpc_async("worker0", fail)
        eventually(future.done)
    yield future
    assert not called


def test_an_exception_is_read_under_the_list_after_shutdown(future):
    with pytest.raises(RuntimeError, match=r"worker0 does not let others run or send .*OwnError"):
        future.wait()


def test_an_exception_is_read_under_the_list_of_its_group_while_another_group_has_none(future):
    with workers(1), pytest.raises(RuntimeError, match=r"worker0 does not let others run or send .*OwnError"):
        future.wait()


def test_an_exception_of_a_group_without_a_list_keeps_its_type_in_a_process_that_had_one(future):
    with workers(1), pytest.raises(OwnError, match="mine"):
        rpc.rpc_async("worker0", raise_own_error).wait()


def wait_after_shutdown(rank):
    """In a process that had no list, which would apply as well."""
    detail = _C._encode_objects(([], b"", b"", pickle.dumps(Evil())), None)
    with workers(1, pickle="off"):
        exceptions._detail_of = lambda exc: detail
        future = rpc.rpc_async("worker0", fail)
        eventually(future.done)
    with pytest.raises(rpc.RemoteException, match="text"):
        future.wait()
    assert not called


def test_an_exception_of_a_worker_without_pickles_is_read_without_them_after_shutdown():
    run_ranks(wait_after_shutdown, 1, init=False)


def test_methods_are_refused_after_shutdown(future):
    with pytest.raises(rpc.NotAllowedError, match=r"worker0 does not let others run or send .*Thing.method"):
        check_method(Thing(), "method")
