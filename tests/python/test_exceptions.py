"""Exceptions described by a callee and rebuilt by a caller, without a group."""

import dataclasses
import pickle
import sys
import traceback

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


def linked(exc, cause=None, context=None):
    for name, value in (("cause", cause), ("context", context), ("suppress_context", cause is not None)):
        BaseException.__setattr__(exc, f"__{name}__", value)
    return exc


def test_causes_and_contexts_arrive_with_type_text_arguments_attributes_and_notes():
    inner = linked(KeyError("inner"), context=OSError("first"))
    inner.code, inner.handle, inner.__notes__ = 3, Unpicklable(), ["a note"]
    text, back = travel(linked(ValueError("outer"), cause=inner, context=inner))
    assert type(back) is ValueError and str(back) == text and back.__suppress_context__
    cause = back.__cause__
    assert type(cause) is KeyError and cause is back.__context__
    assert str(cause) == "'inner'" and cause.args == ("inner",) and cause.code == 3 and not hasattr(cause, "handle")
    assert cause.__notes__ == ["a note"] and cause.__cause__ is None and not cause.__suppress_context__
    assert type(cause.__context__) is OSError and str(cause.__context__) == "first"
    shown = "".join(traceback.format_exception(back))
    assert shown.startswith("OSError: first\n\nDuring handling") and "The above exception was the direct cause" in shown


def test_a_suppressed_context_stays_suppressed():
    exc = linked(ValueError("outer"), context=KeyError("hidden"))
    exc.__suppress_context__ = True
    _, back = travel(exc)
    assert back.__suppress_context__ and back.__cause__ is None and type(back.__context__) is KeyError
    assert "hidden" not in "".join(traceback.format_exception(back))


def test_an_exception_without_links_arrives_without():
    _, back = travel(ValueError("x"))
    assert back.__cause__ is None and back.__context__ is None and not back.__suppress_context__


class LinkedLocally:
    """Makes a type that cannot be pickled by name."""

    @staticmethod
    def make(text):
        return type("LocalError", (Exception,), {})(text)


def test_what_cannot_be_pickled_becomes_a_runtime_error_and_its_neighbours_keep_their_types():
    local = linked(LinkedLocally.make("local"), cause=KeyError("below"))
    odd = linked(TwoArgumentsError(17, "seventeen"), cause=local)
    _, back = travel(linked(ValueError("outer"), cause=linked(SystemExit(3), cause=odd)))
    assert type(back) is ValueError
    end = back.__cause__
    assert type(end) is RuntimeError and "SystemExit is not an Exception" in str(end)
    assert isinstance(end.__cause__, TwoArgumentsError) and isinstance(end.__cause__, RuntimeError)
    assert str(end.__cause__) == "seventeen" and end.__cause__.code == 17
    below = end.__cause__.__cause__
    assert type(below) is RuntimeError and "its type cannot be pickled" in str(below) and "local" in str(below)
    assert type(below.__cause__) is KeyError


def test_an_exception_whose_type_cannot_be_pickled_keeps_its_cause():
    _, back = travel(linked(LinkedLocally.make("local"), cause=KeyError("below")))
    assert type(back) is RuntimeError and "gets a RuntimeError instead" in str(back)
    assert type(back.__cause__) is KeyError


def test_arguments_that_cannot_be_pickled_are_replaced_by_the_text():
    _, back = travel(linked(ValueError("outer"), cause=PlainError("x", lambda: 1)))
    assert type(back.__cause__) is PlainError and back.__cause__.args == (str(back.__cause__),)


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    code: int = 0


def test_a_frozen_dataclass_keeps_type_and_cause():
    _, back = travel(linked(FrozenError(5), cause=linked(FrozenError(6), context=KeyError("first"))))
    assert isinstance(back, FrozenError) and isinstance(back.__cause__, FrozenError)
    assert (back.code, back.__cause__.code) == (5, 6) and type(back.__cause__.__context__) is KeyError


def test_cycles_of_links_are_cut():
    first, second = ValueError("first"), KeyError("second")
    linked(first, cause=second)
    linked(second, cause=first, context=second)
    _, back = travel(linked(PlainError("outer"), cause=first))
    assert [type(each) for each in chain(back)] == [PlainError, ValueError, KeyError]


def chain(exc):
    seen = []
    while exc is not None:
        seen.append(exc)
        exc = exc.__cause__
    return seen


def test_long_chains_arrive_in_part():
    exc = ValueError("0")
    for number in range(1, 300):
        exc = linked(ValueError(str(number)), cause=exc)
    _, back = travel(exc)
    assert [str(each) for each in chain(back)[1:]] == [str(number) for number in range(298, 199, -1)]


def test_malformed_links_are_refused():
    node = ("text", b"", b"", "", None, None, False, [])
    for nodes in (
        [],
        [(*node[:4], 5, *node[5:])],
        [(*node[:4], 0, *node[5:])],
        [node[:3]],
        [PlainError],
        [(*node[:-1], [1]), (*node[:-1], [0])],
    ):
        back = _rebuild_exception("the text", b"L" + pickle.dumps((b"", nodes)), "worker1")
        assert type(back) is RuntimeError and "the text" in str(back) and back.__cause__ is None


if sys.version_info >= (3, 11):
    from builtins import BaseExceptionGroup, ExceptionGroup

    class OwnGroup(ExceptionGroup):
        def derive(self, members):
            return OwnGroup(self.message, members)

    def test_a_group_arrives_with_its_members():
        inner = OwnGroup("inner", [PlainError("a"), linked(TwoArgumentsError(17, "b"), cause=OSError("c"))])
        inner.code = 4
        inner.exceptions[0].code = 5
        text, back = travel(ExceptionGroup("outer", [KeyError("k"), inner, LinkedLocally.make("local")]))
        assert isinstance(back, ExceptionGroup) and isinstance(back, RuntimeError)  # RuntimeError with torch's RPC
        assert "Original exception on remote side was " + text in str(back) and back.message == "outer"
        key, group, local = back.exceptions
        assert type(key) is KeyError and key.args == ("k",) and type(local) is RuntimeError and "local" in str(local)
        assert type(group) is OwnGroup and group.message == "inner" and group.code == 4
        plain, odd = group.exceptions
        assert type(plain) is PlainError and plain.code == 5 and odd.code == 17 and type(odd.__cause__) is OSError
        keys, others = back.split(KeyError)
        assert keys.exceptions == (key,) and len(others.exceptions) == 2
        plains = back.subgroup(PlainError)
        assert type(plains.exceptions[0]) is OwnGroup

    def test_a_group_may_be_a_cause_and_share_members():
        member = KeyError("shared")
        group = linked(ExceptionGroup("both", [member, ExceptionGroup("again", [member])]), context=member)
        member.__context__ = group  # as if it had been raised again while the group was handled
        _, back = travel(linked(ValueError("outer"), cause=group))
        group = back.__cause__
        assert type(group) is ExceptionGroup and str(group) == "both (2 sub-exceptions)"
        assert group.exceptions[0] is group.exceptions[1].exceptions[0] is group.__context__
        assert group.exceptions[0].__context__ is None

    def test_a_group_that_would_end_the_caller_becomes_a_runtime_error():
        _, back = travel(BaseExceptionGroup("end", [KeyboardInterrupt(), KeyError("k")]))
        assert type(back) is RuntimeError and "KeyboardInterrupt" in str(back)

    def test_a_group_of_many_members_arrives_in_part():
        _, back = travel(ExceptionGroup("many", [ValueError(str(number)) for number in range(5000)]))
        assert [str(each) for each in back.exceptions] == [str(number) for number in range(999)]


def test_upstreams_remote_exceptions_can_be_raised():
    _handle_exception(5)
    with pytest.raises(ValueError, match="the text"):
        _handle_exception(RemoteException("the text", ValueError))
