"""Each exception class of the standard library arrives as a local pickle round trip gives it, with the remote text."""

import builtins
import contextlib
import importlib
import pickle
import sys
import types
import urllib.error
import warnings

import pytest
from outcomes import travel

# Importing these prints something, opens a window or a browser, or needs a display.
NOT_IMPORTED = {"antigravity", "this", "idlelib", "turtle", "turtledemo", "tkinter"}
SUBMODULES = [
    "concurrent.futures",
    "dbm.dumb",
    "email.errors",
    "http.client",
    "http.cookies",
    "importlib.metadata",
    "multiprocessing.context",
    "unittest.case",
    "urllib.error",
    "xml.dom",
    "xml.etree.ElementTree",
    "xml.parsers.expat",
    "xml.sax",
    "xmlrpc.client",
]


def exception_classes():
    found = {}
    for name in [*sorted(sys.stdlib_module_names - NOT_IMPORTED), *SUBMODULES]:
        with contextlib.suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(name)
            for value in vars(module).values():
                if isinstance(value, type) and issubclass(value, Exception):
                    found[f"{value.__module__}.{value.__qualname__}"] = value
    return [found[name] for name in sorted(found)]


ARGUMENTS = [
    ("utf-8", b"ab\xff", 2, 3, "invalid start byte"),
    ("utf-8", "ab\ud800", 2, 3, "surrogates not allowed"),
    ("ab\ud800", 2, 3, "no mapping"),
    (2, "No such file or directory", "/nowhere", None, "/elsewhere"),
    (2, "No such file or directory", "/nowhere"),
    ("bad syntax", ("file.py", 3, 5, "a = = 1\n", 3, 6)),
    ("several", [ValueError("first"), KeyError("second")]),
    (3, ["command", "argument"], b"output", b"stderr"),
    (5,),
    (("key", 1),),
    ("text",),
    ("one", "two"),
    ("one", "two", 3),
    ("one", 2, 3, 4),
    (7, 8),
    (),
]
# Takes any object for the answer's file, and closes it at the end.
OF_A_CLASS = {urllib.error.HTTPError: [("http://host/page", 404, "not found", {}, None)]}


def examples(cls):
    """Instances that can be pickled, of as many forms as the constructor takes."""
    made = []
    for args in OF_A_CLASS.get(cls, ARGUMENTS):
        with contextlib.suppress(Exception):
            exc = cls(*args)
            if type(exc) is cls and copy_of(exc) is not None:
                made.append(exc)
    return made


def copy_of(exc):
    try:
        return pickle.loads(pickle.dumps(exc))
    except Exception:
        return None


EXAMPLES = {cls: made for cls in exception_classes() if (made := examples(cls))}


def state_of(exc):
    """The attributes that hold values: those of the instance and those in C."""
    fields = {"args": exc.args, **vars(exc)}
    for cls in type(exc).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, (types.MemberDescriptorType, types.GetSetDescriptorType, property)):
                with contextlib.suppress(Exception):
                    fields.setdefault(name, getattr(exc, name))
    fields.update(vars(exc))
    for name in [name for name in fields if name.startswith("__")] + ["obj"]:
        fields.pop(name, None)
    return fields


def comparable(value):
    if isinstance(value, BaseException):
        return type(value).__name__, state_of(value)
    if isinstance(value, (list, tuple)):
        return [comparable(each) for each in value]
    if isinstance(value, dict):
        return {name: comparable(each) for name, each in value.items()}
    return value if type(value).__eq__ is not object.__eq__ else type(value)


def check_same_state(arrived, sent):
    """Local pickles lose some attributes, for example the written characters of a BlockingIOError."""
    arrived, local, sent = (comparable(state_of(each)) for each in (arrived, copy_of(sent), sent))
    assert arrived.keys() == sent.keys()
    for name, value in arrived.items():
        assert value in (local.get(name), sent[name]), name


@pytest.mark.parametrize("cls", EXAMPLES, ids=lambda cls: f"{cls.__module__}.{cls.__qualname__}")
def test_a_standard_exception_arrives_with_its_state_and_can_be_sent_on(cls):
    for exc in EXAMPLES[cls]:
        text, back = travel(exc)
        assert isinstance(back, cls) and type(back).__qualname__ == cls.__qualname__
        assert text in str(back) and "Failed to create" not in str(back)
        check_same_state(back, exc)
        next_text, again = travel(back)
        assert isinstance(again, cls) and next_text in str(again)
        check_same_state(again, exc)
        assert type(pickle.loads(pickle.dumps(back))) is cls


def test_the_table_has_all_builtin_classes_and_most_others():
    for name, cls in vars(builtins).items():
        if isinstance(cls, type) and issubclass(cls, Exception):
            assert cls in EXAMPLES, name
    assert len(EXAMPLES) > 150
