"""Exceptions described by a callee and rebuilt by a caller, without a group."""

import dataclasses
import pickle
import sys
import traceback

import pytest
from outcomes import travel

import torchrpc.rpc as rpc
from torchrpc import _C
from torchrpc.rpc import internal
from torchrpc.rpc._values import exceptions
from torchrpc.rpc.internal import _describe_exception, _handle_exception, _rebuild_exception
from torchrpc.testing import workers


@pytest.fixture(scope="module", autouse=True)
def no_worker_has_refused_pickles():
    """A process without a worker goes on refusing what its latest one, that of another test, has refused."""
    with workers(1):
        pass


class PlainError(Exception):
    pass


def encoded(value):
    return _C._encode_objects(value, None)


def described(names, args=("text",), fields=None, attributes=None, pickled=b"", nodes=()):
    """The detail of an exception, as a callee could send it."""
    parts = names, encoded((args, fields or {})), encoded(attributes or {}), pickled
    return encoded((encoded(parts), [*nodes], 0, 0))


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


def test_a_constructor_with_more_arguments_keeps_type_text_and_state():
    text, back = travel(TwoArgumentsError(17, "seventeen"))
    assert isinstance(back, TwoArgumentsError) and type(back).__qualname__ == "TwoArgumentsError" and str(back) == text
    assert isinstance(back, RuntimeError)  # as with torch's RPC
    assert back.code == 17 and back.args == ("seventeen",)


def test_in_torchs_place_such_an_exception_has_torchs_text(monkeypatch):
    monkeypatch.setattr(exceptions, "replaces_torch", lambda: True)
    text, back = travel(TwoArgumentsError(17, "seventeen"))
    assert isinstance(back, TwoArgumentsError) and isinstance(back, RuntimeError) and back.code == 17
    assert f"Original exception on remote side was {text}" in str(back)
    assert type(travel(PlainError("x"))[1]) is PlainError


class RequiringError(Exception):
    def __new__(cls, *, code):
        return super().__new__(cls)

    def __init__(self, *, code):
        super().__init__()
        self.code = code


class SlotsError(OSError):
    __slots__ = ("detail",)


def test_no_constructor_of_the_program_runs():
    text, back = travel(RequiringError(code=3))
    assert isinstance(back, RequiringError) and back.code == 3 and back.args == () and text in str(back)
    slots = SlotsError(2, "No such file", "/nowhere")
    slots.detail = [1, 2]
    text, back = travel(slots)
    assert isinstance(back, SlotsError) and (back.errno, back.filename, back.detail) == (2, "/nowhere", [1, 2])
    assert str(back) == text


class KeyOfCaller:
    pass


def test_an_argument_that_the_caller_lacks_does_not_cost_the_type(monkeypatch):
    text, detail = _describe_exception(PlainError(KeyOfCaller()))
    monkeypatch.delattr(sys.modules[__name__], "KeyOfCaller")
    back = _rebuild_exception(text, detail, "worker1")
    assert type(back) is PlainError and str(back) == text


def test_a_str_that_hides_the_text_does_not_hide_it():
    text, back = travel(SilentError("loud"))
    assert isinstance(back, SilentError) and text in str(back)


def test_attributes_survive_but_for_those_that_cannot_travel():
    exc = PlainError("x")
    exc.code, exc.handle = {"a": 1}, Unpicklable()
    _, back = travel(exc)
    assert back.code == {"a": 1} and not hasattr(back, "handle")


def test_a_local_type_becomes_a_remote_exception_that_describes_it():
    class LocalError(Exception):
        pass

    text, back = travel(LocalError("x"))
    assert type(back) is rpc.RemoteException and isinstance(back, RuntimeError) and str(back) == text
    assert "LocalError" in str(back) and "gets a RemoteException instead" in str(back)
    assert back.type_name.endswith("<locals>.LocalError") and back.message == "x" and back.worker == "worker1"
    assert back.traceback.startswith("Traceback (most") and back.traceback.endswith("LocalError: x\n")
    _, again = travel(back)
    assert type(again) is rpc.RemoteException and again.type_name == back.type_name and again.worker == "worker1"


def test_a_type_that_the_caller_lacks_becomes_a_remote_exception_that_says_why():
    back = _rebuild_exception("On worker1: it broke", described([(__name__, "GoneeError")]), "worker1")
    assert type(back) is rpc.RemoteException
    assert "GoneeError" in str(back) and "On worker1: it broke" in str(back)


def test_a_broken_repr_does_not_hide_the_error(capsys):
    text, back = travel(UnshowableError("x"))
    assert "UnshowableError" in text and isinstance(back, UnshowableError)


@pytest.mark.parametrize("exc", [SystemExit(3), KeyboardInterrupt()])
def test_an_exception_that_would_end_the_caller_becomes_a_remote_exception(exc):
    _, back = travel(exc)
    assert type(back) is rpc.RemoteException and back.type_name == f"builtins.{type(exc).__name__}"


def test_the_callee_logs_the_error_and_prints_nothing(capsys, caplog):
    travel(ValueError("to be seen"))
    assert [record.levelname for record in caplog.records] == ["ERROR"] and "to be seen" in caplog.text
    assert capsys.readouterr().err == ""


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


def test_what_cannot_be_pickled_becomes_a_remote_exception_and_its_neighbours_keep_their_types():
    local = linked(LinkedLocally.make("local"), cause=KeyError("below"))
    odd = linked(TwoArgumentsError(17, "seventeen"), cause=local)
    _, back = travel(linked(ValueError("outer"), cause=linked(SystemExit(3), cause=odd)))
    assert type(back) is ValueError
    end = back.__cause__
    assert type(end) is rpc.RemoteException and "SystemExit is not an Exception" in str(end)
    assert type(end.__cause__) is TwoArgumentsError
    assert str(end.__cause__) == "seventeen" and end.__cause__.code == 17
    below = end.__cause__.__cause__
    assert type(below) is rpc.RemoteException and "its type cannot be pickled" in str(below)
    assert below.type_name.endswith("LocalError") and below.message == "local"
    assert type(below.__cause__) is KeyError


def test_an_exception_whose_type_cannot_be_pickled_keeps_its_cause():
    _, back = travel(linked(LinkedLocally.make("local"), cause=KeyError("below")))
    assert type(back) is rpc.RemoteException and "gets a RemoteException instead" in str(back)
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
    node = ("text", "type", b"", "", None, None, False, [])
    for nodes in (
        [],
        [(*node[:4], 5, *node[5:])],
        [(*node[:4], 0, *node[5:])],
        [node[:3]],
        [PlainError],
        [(*node[:-1], [1]), (*node[:-1], [0])],
    ):
        back = _rebuild_exception("the text", encoded((b"", nodes, 0, 0)), "worker1")
        assert type(back) is rpc.RemoteException and "the text" in str(back) and back.__cause__ is None


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
        assert isinstance(back, ExceptionGroup) and str(back) == text and back.message == "outer"
        key, group, local = back.exceptions
        assert type(key) is KeyError and key.args == ("k",) and type(local) is rpc.RemoteException
        assert "local" in str(local)
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

    def test_a_group_that_would_end_the_caller_becomes_a_remote_exception():
        _, back = travel(BaseExceptionGroup("end", [KeyboardInterrupt(), KeyError("k")]))
        assert type(back) is rpc.RemoteException and "KeyboardInterrupt" in str(back)

    def test_a_group_of_many_members_arrives_in_part():
        _, back = travel(ExceptionGroup("many", [ValueError(str(number)) for number in range(5000)]))
        assert [str(each) for each in back.exceptions] == [str(number) for number in range(999)]


def test_upstreams_remote_exceptions_can_be_raised():
    _handle_exception(5)
    with pytest.raises(ValueError, match="the text"):
        _handle_exception(internal.RemoteException("the text", ValueError))


def nested(levels=60):
    """A value of 60 tuples, whose text would have 2**60 parts."""
    value = "x"
    for _ in range(levels):
        value = (value, value)
    return value


def evil_details():
    """What a callee of another program could send."""

    def detail(kind, args=("text",), fields=None, **state):
        names = [(kind.__module__, kind.__qualname__)] if isinstance(kind, type) else kind
        return described(names, args, fields, state)

    evil = (nested(),)
    yield "arguments", detail(KeyError, args=evil)
    yield "fields", detail(OSError, args=(2, "x"), fields={"errno": 2, "strerror": nested()})
    yield "syntax", detail(SyntaxError, fields={"msg": "x", "lineno": 1, "filename": "f", "text": [1], "offset": evil})
    marks = {"msg": "x", "lineno": 1, "filename": "f", "text": "x", "offset": 1, "end_lineno": 1, "end_offset": 10**11}
    yield "marks below a line", detail(SyntaxError, fields=marks)
    yield "notes", detail(ValueError, __notes__=[nested()])
    yield "notes that are no list", detail(ValueError, __notes__=nested())
    yield "attribute", detail(ShowsAttribute, shown=nested())
    yield "type", detail([nested()])
    yield "types", detail([("builtins", "ValueError"), nested()])
    state = {"args": pickle.dumps(((nested(),), {})), "shown": nested()}
    yield "a pickle", described([], pickled=pickle.dumps((ShowsAttribute, state)))
    rest = ("builtins.ValueError", b"", "", None, None, False, [])
    for position in range(8):
        node = ("text", *rest)
        node = (*node[:position], nested(), *node[position + 1 :])
        yield f"node {position}", described([("builtins", "ValueError")], nodes=[node])
    text = "x" * 100_000
    member = (text, *rest)
    links = [("text", *rest[:6], list(range(1, 900))), *[member] * 900]
    yield "long texts", described([("builtins", "ExceptionGroup")], nodes=links)


class ShowsAttribute(Exception):
    def __str__(self):
        return f"{self.__dict__.get('shown')}"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes and groups")
def test_a_received_exception_is_shown_in_little_time_and_memory(run_python):
    """In a process of its own, because one that fails does not end."""
    run_python(__file__)


if __name__ == "__main__":
    for what, sent in evil_details():
        print(what, flush=True)
        back = _rebuild_exception("the text", sent, "worker1")
        shown = "".join(traceback.format_exception(back))
        assert "the text" in str(back) and len(shown) < 20_000_000, what


def test_an_exception_with_large_arguments_is_described_in_little_time_and_memory(caplog):
    for exc in (KeyError(nested()), linked(ValueError("x"), cause=KeyError(nested()))):
        text, back = travel(exc)
        assert "its arguments are too large to show" in text and "in travel" in text and len(text) < 10_000
        assert text in str(back)


def test_names_that_would_hide_parts_of_an_exceptions_class_do_not_arrive():
    exc = ValueError("x")
    exc.with_traceback = exc.add_note = exc.__array_interface__ = exc.__reduce_ex__ = None
    exc.code = 7
    _, back = travel(exc)
    assert vars(back) == {"code": 7}
