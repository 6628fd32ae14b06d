"""Reports of workers that write anything: the commands that read them end without a traceback."""

import contextlib
import copy
import io
import random

import pytest
from observed_reports import circle

import torchrpc.observe
from torchrpc._untrusted import printable_data
from torchrpc.cli import _target, rrefs, stack, top, why
from torchrpc.observe._fields import fitted

GROUPS = 30
WRONG = [None, True, -1, 2**63 - 1, 2**70, float("inf"), float("nan"), "x\x1b[2J", "", [], {}, [1], {"a": 1}, b"\xff"]
WRONG += [[[]], "worker", 10**6, [["a", 1], [1, "a"], ["b"]], {1: 2}, [{"function": 5}], 1.5]


class Group:
    """A group whose workers have sent these reports."""

    def __init__(self, reports):
        self.answers = reports
        self.members = [torchrpc.observe.Member(name, i, 1, "") for i, name in enumerate(reports)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def reports(self, **_):
        return self.answers

    def report(self, name, **_):
        return self.answers[name]


def paths(value, path=()):
    """Yield the path to each part of a report."""
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from paths(part, (*path, key))


def mutated(report, source):
    """Return the report with one, two or three of its parts replaced by something else."""
    report = copy.deepcopy(report)
    for _ in range(source.choice([1, 1, 2, 3])):
        *to, last = source.choice([path for path in paths(report) if path])
        part = report
        for key in to:
            part = part[key]
        part[last] = source.choice(WRONG)
    return report


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (why, []),
        (why, ["--json"]),
        (stack, []),
        (rrefs, []),
        (top, ["--once", "--every", "0.05"]),
    ],
    ids=["why", "why-json", "stack", "rrefs", "top"],
)
def test_a_report_with_wrong_fields_ends_no_command(monkeypatch, command, arguments):
    monkeypatch.setattr(why, "SAMPLES_APART_S", 0)
    monkeypatch.setattr(_target, "check_listens", lambda *_: None)
    for seed in range(GROUPS):
        source = random.Random(seed)
        reports = circle()
        liar = source.choice(list(reports))
        reports[liar] = fitted(printable_data(mutated(reports[liar], source)))
        monkeypatch.setattr(torchrpc.observe, "attach", lambda *_, reports=reports, **__: Group(reports))
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            command.main(["host:1", *arguments])
        assert output.getvalue(), seed
        assert not [each for each in output.getvalue() if ord(each) < 32 and each not in "\n\t"], seed


def test_a_report_keeps_the_fields_that_fit():
    for report in circle().values():
        assert fitted(copy.deepcopy(report)) == report


@pytest.mark.parametrize(
    ("report", "rest"),
    [
        ("text", {}),
        (None, {}),
        ({"worker": 1, "members": {}, "threads": 5}, {}),
        ({"worker": {"name": 5, "host": "h", "pid": "x", 7: 1}}, {"worker": {"host": "h"}}),
        ({"threads": [1, {"tid": 1.5, "name": "n"}]}, {"threads": [{"name": "n"}]}),
        ({"threads": [{"serves": [["a", 1], ["a"], "ab", [1, 1]]}]}, {"threads": [{"serves": [["a", 1]]}]}),
        ({"pool": {"size": 2**70, "idle": float("nan"), "max": 3, "x": b"1"}}, {"pool": {"max": 3}}),
        ({"new": {"a": [1, b"2", {"b": "c", "d": {1}}]}}, {"new": {"a": [1, {"b": "c"}]}}),
    ],
)
def test_fields_of_other_kinds_are_removed(report, rest):
    assert fitted(report) == rest


def test_a_report_may_be_nested_without_end():
    nested = {}
    for level in range(150):
        nested = {"a": nested, "b": [nested]} if level % 50 == 0 else {"a": nested}
    assert str(fitted({"new": nested})).count("{") < 100
