"""What a worker with `allowed_functions` has received is read under its list, also after its shutdown."""

import time

import pytest
import test_limited_pickles as attacks

import torchrpc.rpc as rpc
from torchrpc.rpc import _exceptions as exceptions
from torchrpc.rpc._allow_list import check_method
from torchrpc.testing import workers


def fail():
    raise ValueError("text")


class OwnError(Exception):
    pass


def raise_own_error():
    raise OwnError("mine")


class Thing:
    def method(self):
        pass


def leave_trace(path):
    with open(path, "w") as file:
        file.write("trace")


@pytest.fixture
def future(tmp_path, monkeypatch):
    """Of a call that failed on a worker with a list. Its exception would call `leave_trace`, which is not listed."""
    call = attacks.reduce(attacks.name(__name__, "leave_trace"), attacks.text(str(tmp_path / "trace")))
    detail = attacks.whole(attacks.tuple_of(attacks.name("builtins", "ValueError"), attacks.dict_of(note=call)))
    with workers(1, allowed_functions=[fail]), monkeypatch.context() as patch:
        patch.setattr(exceptions, "_type_and_attributes", lambda exc: detail)
        future = rpc.rpc_async("worker0", fail)
        while not future.done():
            time.sleep(0.01)
    yield future
    assert not (tmp_path / "trace").exists()


def test_an_exception_is_read_under_the_list_after_shutdown(future):
    with pytest.raises(RuntimeError, match=r"worker0 does not let others run or send .*leave_trace"):
        future.wait()


def test_an_exception_is_read_under_the_list_of_its_group_while_another_group_has_none(future):
    with workers(1), pytest.raises(RuntimeError, match=r"worker0 does not let others run or send .*leave_trace"):
        future.wait()


def test_an_exception_of_a_group_without_a_list_keeps_its_type_in_a_process_that_had_one(future):
    with workers(1), pytest.raises(OwnError, match="mine"):
        rpc.rpc_async("worker0", raise_own_error).wait()


def test_methods_are_refused_after_shutdown(future):
    with pytest.raises(rpc.NotAllowedError, match=r"worker0 does not let others run or send .*Thing.method"):
        check_method(Thing(), "method")
