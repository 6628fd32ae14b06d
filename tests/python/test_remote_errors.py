"""The errors that a caller gets when a call fails on the callee."""

import builtins
import sys
import threading
import time

import pytest

import torchrpc.rpc as rpc
from torchrpc.testing import workers


@pytest.fixture(scope="module", autouse=True)
def group():
    with workers(2) as names:
        yield names


class CustomError(Exception):
    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


class OnlyThereError(Exception):
    pass


class BadState:
    def __getstate__(self):
        raise ValueError("not to be pickled")


def fail(kind, *args):
    raise kind(*args)


def fail_because(attributes):
    """Raises a ValueError that a CustomError caused, in whose place a KeyError had been raised."""
    try:
        try:
            raise KeyError("first")
        except KeyError:
            error = CustomError(17, "seventeen")
            error.__notes__ = ["a note"]
            vars(error).update(attributes)
            raise error  # noqa: B904
    except CustomError as cause:
        raise ValueError("outer") from cause


def fail_there_because(to):
    try:
        rpc.rpc_sync(to, fail_because, ({},))
    except ValueError as error:
        raise PlainError("above") from error


class PlainError(Exception):
    pass


def fail_in_a_group():
    group = getattr(builtins, "ExceptionGroup")  # noqa: B009  Python 3.10 has none
    raise group("several", [KeyError("k"), group("inner", [CustomError(17, "seventeen")])])


def fail_with_local_type():
    class LocalError(Exception):
        pass

    raise LocalError("hidden")


def forget(name):
    delattr(sys.modules[__name__], name)


def raise_type_unknown_to_the_caller():
    kind = type("InventedError", (Exception,), {"__module__": __name__})
    globals()["InventedError"] = kind
    raise kind("from elsewhere")


def not_on_callee():
    return 1


def nested_failure(to):
    return rpc.rpc_sync(to, fail, (KeyError, "deep"))


def sleep(seconds):
    time.sleep(seconds)  # the function under test is slow
    return seconds


_told = {"its own time-out": threading.Event(), "the default": threading.Event()}


def wait_to_be_told(what):
    _told[what].wait(60)


def tell(what):
    _told[what].set()


MODES = {
    "rpc_sync": lambda *args, **kw: rpc.rpc_sync("worker1", *args, **kw),
    "rpc_async": lambda *args, **kw: rpc.rpc_async("worker1", *args, **kw).wait(),
    "remote": lambda *args, **kw: rpc.remote("worker1", *args, **kw).to_here(),
}


@pytest.fixture(params=MODES)
def call(request):
    return MODES[request.param]


@pytest.mark.parametrize("kind", [ValueError, KeyError, ZeroDivisionError, StopIteration])
def test_the_type_is_kept_and_the_text_names_the_worker(call, kind):
    with pytest.raises(kind) as raised:
        call(fail, (kind, "Expected error"))
    text = str(raised.value)
    assert text.startswith("On WorkerInfo(id=1, name=worker1):\n")
    assert f"{kind.__name__}('Expected error')" in text and "in fail" in text and "raise kind(*args)" in text


def test_a_custom_type_keeps_its_attributes(call):
    with pytest.raises(CustomError, match="seventeen") as raised:
        call(fail, (CustomError, 17, "seventeen"))
    assert raised.value.code == 17


def test_the_fields_in_c_arrive(call):
    with pytest.raises(FileNotFoundError) as missing:
        call(open, ("/nowhere/at all",))
    assert (missing.value.errno, missing.value.filename) == (2, "/nowhere/at all")
    assert str(missing.value).startswith("On WorkerInfo(id=1, name=worker1):\n")
    with pytest.raises(UnicodeDecodeError) as undecodable:
        call(bytes.fromhex("6162ff").decode)
    assert (undecodable.value.start, undecodable.value.object) == (2, b"ab\xff")
    with pytest.raises(KeyError) as unknown:
        call(fail, (KeyError, ("key", 1)))
    assert unknown.value.args == (("key", 1),)


def test_the_cause_and_the_context_arrive(call):
    with pytest.raises(ValueError, match="outer") as raised:
        call(fail_because, ({"code": 18},))
    cause = raised.value.__cause__
    assert isinstance(cause, CustomError) and str(cause) == "seventeen" and cause.code == 18
    assert cause.__notes__ == ["a note"] and raised.value.__suppress_context__
    assert type(cause.__context__) is KeyError and cause.__context__.args == ("first",)
    assert cause.__cause__ is None and not cause.__suppress_context__


def test_the_causes_of_nested_calls_arrive(call):
    with pytest.raises(PlainError, match=r"(?s)name=worker1.*name=worker0") as raised:
        call(fail_there_because, ("worker0",))
    outer = raised.value.__cause__
    assert type(outer) is ValueError and str(outer).startswith("On WorkerInfo(id=0, name=worker0):\n")
    assert isinstance(outer.__cause__, CustomError) and type(outer.__cause__.__context__) is KeyError


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no groups of exceptions")
def test_the_members_of_a_group_arrive(call):
    with pytest.raises(builtins.ExceptionGroup, match="several") as raised:
        call(fail_in_a_group)
    key, inner = raised.value.exceptions
    assert type(key) is KeyError and inner.message == "inner" and inner.exceptions[0].code == 17


def test_a_type_without_a_name_becomes_a_remote_exception_that_names_it(call):
    with pytest.raises(rpc.RemoteException, match=r"LocalError.*hidden"):
        call(fail_with_local_type)


def test_a_type_that_the_caller_cannot_import_becomes_a_remote_exception(call):
    with pytest.raises(rpc.RemoteException, match=r"(?s)InventedError.*from elsewhere") as raised:
        call(raise_type_unknown_to_the_caller)
    assert raised.value.type_name == f"{__name__}.InventedError" and raised.value.message == "from elsewhere"
    assert raised.value.worker == "worker1" and "in raise_type_unknown_to_the_caller" in raised.value.traceback


def test_nested_errors_name_both_workers():
    with pytest.raises(KeyError, match=r"(?s)name=worker1.*name=worker0.*deep"):
        rpc.rpc_sync("worker1", nested_failure, ("worker0",))


def test_wrong_arguments_raise_a_type_error(call):
    with pytest.raises(TypeError, match=r"not_on_callee\(\) takes 0 positional arguments"):
        call(not_on_callee, (1,))


def test_a_function_that_the_callee_lacks_is_named_with_a_remedy():
    rpc.rpc_sync("worker1", forget, ("OnlyThereError",))
    for mode in MODES.values():
        for kind in (AttributeError, RuntimeError):  # the error of torch depends on its version
            with pytest.raises(kind, match=r"(?s)worker1 has no OnlyThereError.*RPC pickler does not serialize"):
                mode(OnlyThereError, ("x",))


def test_a_result_that_cannot_be_sent_is_named_and_the_group_continues():
    for mode in (MODES["rpc_sync"], MODES["rpc_async"]):
        with pytest.raises(TypeError, match=r"worker1 cannot send a value of type lock: .*rpc\.remote\(\)"):
            mode(threading.Lock)
    with pytest.raises(ValueError, match="not to be pickled"):
        rpc.rpc_sync("worker1", BadState)
    assert rpc.rpc_sync("worker1", not_on_callee) == 1


class RaisesWhenRead:
    def __reduce__(self):
        return fail_to_read, ()


def fail_to_read():
    raise LookupError("not on this side")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes of exceptions need Python 3.11")
def test_the_error_of_a_result_that_cannot_be_read_names_its_worker():
    with pytest.raises(LookupError, match="not on this side") as raised:
        rpc.rpc_sync("worker1", RaisesWhenRead)
    assert raised.value.__notes__ == ["raised while worker0 read the result of a call to worker1"]
    with pytest.raises(LookupError, match="not on this side") as raised:
        rpc.rpc_async("worker1", RaisesWhenRead).wait()
    assert raised.value.__notes__ == ["raised while worker0 read the result of a call to worker1"]


def test_a_value_that_cannot_be_sent_can_stay_in_an_rref():
    rref = rpc.remote("worker1", threading.Lock)
    with pytest.raises(TypeError, match="cannot send a value of type lock"):
        rref.to_here()
    assert rref.rpc_sync().locked() is False


def test_system_exit_ends_no_process(call):
    with pytest.raises(RuntimeError, match="SystemExit"):
        call(sys.exit, (3,))
    assert rpc.rpc_sync("worker1", not_on_callee) == 1


def test_a_call_that_takes_too_long_raises_an_error():
    args = ("its own time-out",)
    for run in (
        lambda: rpc.rpc_sync("worker1", wait_to_be_told, args, timeout=0.05),
        lambda: rpc.rpc_async("worker1", wait_to_be_told, args, timeout=0.05).wait(),
    ):
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            run()
    rpc.rpc_sync("worker1", tell, args)
    assert rpc.rpc_sync("worker1", sleep, (0.1,), timeout=0) == 0.1


def test_the_default_timeout_can_be_changed():
    assert rpc.get_rpc_timeout() == 60
    rpc._set_rpc_timeout(0.05)
    try:
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            rpc.rpc_sync("worker1", wait_to_be_told, ("the default",))
        assert rpc.rpc_sync("worker1", sleep, (0.1,), timeout=30) == 0.1
    finally:
        rpc._set_rpc_timeout(60)
        rpc.rpc_sync("worker1", tell, ("the default",))


def test_every_waiter_of_a_failed_future_gets_the_error():
    future = rpc.rpc_async("worker1", fail, (ValueError, "again"))
    for _ in range(2):
        with pytest.raises(ValueError, match="again"):
            future.wait()
    assert future.done()
    with pytest.raises(RuntimeError, match="again"):  # torch makes this of errors in callbacks
        # as it is anyway
        # the default
        future.then(lambda f: f.wait()).wait()
