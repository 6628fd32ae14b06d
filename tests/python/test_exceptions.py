"""Exceptions described by a callee and rebuilt by a caller, without a group."""

import pickle

import pytest

from torchrpc.rpc.internal import RemoteException, _describe_exception, _handle_exception, _rebuild_exception


class PlainError(Exception):
    pass


class TwoArgumentsError(Exception):
    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


class SilentError(Exception):
    def __str__(self):
        return "nothing"


class UnshowableError(Exception):
    def __repr__(self):
        raise ValueError("no repr")


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not me")


def travel(exc):
    try:
        raise exc
    except BaseException as caught:
        text, detail = _describe_exception(caught)
    return text, _rebuild_exception(text, detail, "worker1")


@pytest.mark.parametrize("kind", [ValueError, KeyError, OSError, PlainError, StopIteration, ZeroDivisionError])
def test_type_and_text_survive(kind):
    text, back = travel(kind("first line\nsecond"))
    assert type(back) is kind and str(back) == text
    assert "first line\nsecond" in text and "Traceback" in text and "in travel" in text


def test_the_text_names_the_worker_first():
    text, _ = travel(ValueError("x"))
    assert text.startswith("On ") and text.split("\n")[1] == "ValueError('x')"


def test_backslashes_and_unicode_are_preserved():
    _, back = travel(ValueError("C:\\new\\temp …é漢\nline"))
    assert "C:\\\\new\\\\temp …é漢\nline" in str(back)


def test_a_constructor_with_more_arguments_keeps_the_type():
    text, back = travel(TwoArgumentsError(17, "seventeen"))
    assert isinstance(back, TwoArgumentsError) and isinstance(back, RuntimeError)
    assert back.code == 17
    assert "Original exception on remote side was" in str(back) and "TwoArgumentsError" in str(back)
    assert text in str(back)


def test_a_str_that_hides_the_text_does_not_hide_it():
    text, back = travel(SilentError("loud"))
    assert isinstance(back, SilentError) and text in str(back)


def test_attributes_survive_but_for_those_that_cannot_travel():
    exc = PlainError("x")
    exc.code, exc.handle = {"a": 1}, Unpicklable()
    _, back = travel(exc)
    assert back.code == {"a": 1} and not hasattr(back, "handle")


def test_a_local_type_becomes_a_runtime_error_that_names_it():
    class LocalError(Exception):
        pass

    _, back = travel(LocalError("x"))
    assert type(back) is RuntimeError
    assert "LocalError" in str(back) and "gets a RuntimeError instead" in str(back)


def test_a_type_that_the_caller_lacks_becomes_a_runtime_error_that_says_why():
    detail = pickle.dumps((PlainError, {})).replace(b"PlainError", b"GoneeError")
    back = _rebuild_exception("On worker1: it broke", detail, "worker1")
    assert type(back) is RuntimeError
    assert "GoneeError" in str(back) and "On worker1: it broke" in str(back)


def test_a_broken_repr_does_not_hide_the_error(capsys):
    text, back = travel(UnshowableError("x"))
    assert "UnshowableError" in text and isinstance(back, UnshowableError)


@pytest.mark.parametrize("exc", [SystemExit(3), KeyboardInterrupt()])
def test_an_exception_that_would_end_the_caller_becomes_a_runtime_error(exc):
    _, back = travel(exc)
    assert type(back) is RuntimeError and type(exc).__name__ in str(back)


def test_the_callee_prints_the_error(capsys):
    travel(ValueError("to be seen"))
    assert "to be seen" in capsys.readouterr().err


def test_upstreams_remote_exceptions_can_be_raised():
    _handle_exception(5)
    with pytest.raises(ValueError, match="the text"):
        _handle_exception(RemoteException("the text", ValueError))
