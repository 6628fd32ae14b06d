"""`observe._top` and the live view, on reports that are written by hand."""

import asyncio
import json
import sys

import pytest
from observed_reports import call_in, call_out, circle, report, thread
from test_observe_commands import Group

import torchrpc.observe
from torchrpc.cli import _target, top
from torchrpc.observe import _top


def functions(calls, *, function="train.step", side="in", peer="w0", **more):
    return {
        "function": function, "peer": peer, "side": side, "calls": calls, "errors": 1, "bytes": 1024 * calls,
        "p50_s": 0.001, "p99_s": 0.01, "max_s": 0.02, "in_flight": 1,
    } | more  # fmt: skip


def moment(uptime_s, calls):
    """Four workers of which one is silent and one lost; w1 has served `calls` calls of w0."""
    names = ("w0", "w1", "w2", "w3")
    w0 = report(
        "w0",
        uptime_s=uptime_s,
        members=names,
        lost=["w3"],
        out=[call_out(1, "w1", age_s=2.5), call_out(2, "w1", age_s=0.5)],
        functions=[functions(calls, side="out", peer="w1")],
        connections=[
            {"peer": "w1", "how": "accepted over unix, shared memory", "held_calls": 2, "queued_reply_bytes": 5},
            {"peer": "w2", "how": "tcp 10.0.0.1:400", "held_calls": 0, "queued_reply_bytes": 0},
        ],
    )
    w1 = report(
        "w1",
        uptime_s=uptime_s,
        members=names,
        lost=["w3"],
        into=[call_in(1, "w0", age_s=2.4)],
        functions=[functions(calls), functions(7, function="train.pull", peer="w2")],
        pool={"threads": 5, "idle": 1, "blocked": 3, "queued": 1, "strand_queued": 7},
        rrefs={"owned": 3, "held": 1, "forks": 5, "list": []},
        autograd={"contexts": 2, "oldest_s": 5.0},
    )
    w1["worker"]["cpu_s"] = uptime_s / 2
    return {"w0": w0, "w1": w1, "w2": TimeoutError("no answer within 2 s"), "w3": ConnectionError("refused")}


def test_rates_are_differences_of_two_reports():
    shown = _top.snapshot(moment(12.0, 1500), moment(10.0, 500), ["w0", "w1", "w2", "w3", "w4"])
    workers = {row["worker"]: row for row in shown["workers"]}
    assert workers["w0"]["calls_out_per_s"] == 500 and workers["w0"]["calls_in_per_s"] == 0
    assert workers["w1"]["calls_in_per_s"] == 500 and workers["w1"]["bytes_per_s"] == 512000
    assert workers["w1"]["cores"] == 0.5 and workers["w1"]["queued"] == 7 and workers["w1"]["oldest_s"] == 2.4
    assert workers["w0"]["connections"] == {"shm": 1, "tcp": 1} and workers["w0"]["held_calls"] == 2
    assert (workers["w2"]["state"], workers["w3"]["state"], workers["w4"]["state"]) == ("silent", "lost", "silent")
    assert shown["lost"] == ["w3"] and shown["silent"] == {"w2": "no answer within 2 s", "w4": "no report"}
    assert [(row["from"], row["to"], row["function"], row["state"]) for row in shown["calls"]] == [
        ("w0", "w1", "train.step", "running"),
        ("w0", "w1", "", "sent"),
    ]
    step, pull = shown["functions"]
    assert (step["function"], step["calls"], step["calls_per_s"], step["p99_s"]) == ("train.step", 1500, 500, 0.01)
    assert (pull["function"], pull["calls_per_s"], pull["workers"]) == ("train.pull", 0, ["w1"])


def test_there_are_no_rates_without_metrics_or_an_earlier_report():
    for earlier, later in ((None, moment(12.0, 1500)), (circle(), circle())):
        shown = _top.snapshot(later, earlier)
        assert {row.get("calls_in_per_s") for row in shown["workers"]} == {None}


def test_a_restarted_worker_has_no_rates():
    before, after = moment(10.0, 500), moment(12.0, 3)
    before["w1"]["worker"]["incarnation"] = 7
    shown = _top.snapshot(after, before)
    assert next(row for row in shown["workers"] if row["worker"] == "w1")["calls_in_per_s"] is None


def test_sorting():
    shown = _top.snapshot(moment(12.0, 1500), moment(10.0, 500))
    firsts = {by: _top.sorted_workers(shown, by)[0]["worker"] for by in _top.SORTS}
    assert firsts["queue"] == "w1" and firsts["age"] == "w0" and firsts["worker"] == "w0" and firsts["rrefs"] == "w1"
    many = _top.snapshot({f"w{i}": report(f"w{i}") for i in (10, 9, 2)})
    assert [row["worker"] for row in _top.sorted_workers(many, "worker")] == ["w2", "w9", "w10"]


def test_the_table_as_text(monkeypatch, capsys):
    group = Group(moment(10.0, 500), moment(12.0, 1500))
    monkeypatch.setattr(_target, "check_listens", lambda address, timeout_s: None)
    monkeypatch.setattr(torchrpc.observe, "attach", lambda *args, **options: group)
    assert top.main(["host:1", "--once", "--every", "0.05"]) == 0
    assert capsys.readouterr().out.split("\n") == [
        "2 workers, 500 calls/s, 2 in flight, 400 MiB of memory, lost: w3, silent: w2",
        "",
        "worker  state   out/s  in/s  bytes/s  flight  oldest  queue  pool  rrefs  graphs   memory  cpu   connections",
        "w0      ok        500   0.0  500 KiB     2+0   2.5 s      0   2/5    0+0       0  200 MiB   0%  1 shm, 1 tcp",
        "w1      ok        0.0   500  500 KiB     0+1   2.4 s      7   4/5    3+1       2  200 MiB  50%          none",
        "w2      silent",
        "w3      lost",
        "",
        "function    calls/s   p50    p99    max  calls  errors  in flight",
        "train.step      500  1 ms  10 ms  20 ms  1,500       1          1",
        "train.pull      0.0  1 ms  10 ms  20 ms      7       1          1",
        "",
        "oldest calls  from  to  function    state",
        "2.5 s         w0    w1  train.step  running",
        "0.5 s         w0    w1  -           sent",
        "",
        "w2 does not answer: no answer within 2 s",
        "",
    ]


def test_the_table_as_data(monkeypatch, capsys):
    monkeypatch.setattr(_target, "check_listens", lambda address, timeout_s: None)
    monkeypatch.setattr(
        torchrpc.observe, "attach", lambda *args, **options: Group(moment(10.0, 500), moment(12.0, 1500))
    )
    assert top.main(["host:1", "--once", "--json", "--every", "0.05"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["worker"] for row in data["workers"]] == ["w0", "w1", "w3", "w2"]


def test_metrics_that_are_off_are_named():
    assert _top.METRICS in _top.text(_top.snapshot(circle(), circle()))


def test_wrong_arguments(capsys):
    for arguments, words in ((["--json"], "give --once, too"), (["--every", "0"], "It must be from 0.05")):
        with pytest.raises(SystemExit) as exit:
            top.main(arguments)
        assert exit.value.code == 2 and words in capsys.readouterr().err


def test_without_textual_a_sentence_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "textual", None)
    monkeypatch.delitem(sys.modules, "torchrpc.cli._top_app", raising=False)
    with pytest.raises(SystemExit) as exit:
        top.main(["host:1"])
    assert exit.value.code == 2 and capsys.readouterr().err == f"{top.NO_TEXTUAL}\n"


def test_missing_fields_are_no_errors():
    for each in ({}, {"functions": [{}], "connections": [{}], "calls_out": [{}], "members": [{}]}, {"pool": None}):
        assert "w0" in _top.text(_top.snapshot({"w0": each}, {"w0": each}))


# The live view.


async def shown_after(app, pilot, is_shown):
    """Wait until what the app shows fulfils a condition."""
    for _ in range(600):
        await pilot.pause(0.05)
        if app.shown is not None and is_shown(app):
            return
    raise AssertionError(f"the view shows {app.shown}")


class Running(Group):
    """A group that goes on: 500 calls per second, a look every two of its seconds."""

    def __init__(self):
        super().__init__(moment(10.0, 500))
        self.looks = 0

    def reports(self, **options):
        self.looks += 1
        shown = moment(10.0 + 2 * self.looks, 500 + 1000 * self.looks)
        shown["w0"]["threads"] = [thread(1001, serves=[("w1", 4)])]
        return shown


def view(test):
    """Run `await test(app, pilot)` on the live view of such a group."""
    pytest.importorskip("textual", reason="textual is not installed (the extra torchrpc[top])")
    from torchrpc.cli._top_app import TopApp

    async def run():
        app = TopApp(Running(), 0.1, 2.0)
        async with app.run_test(size=(140, 40)) as pilot:
            await test(app, pilot)

    asyncio.run(run())


def cells(app, table):
    from textual.widgets import DataTable

    found = app.query_one(table, DataTable)
    return [[str(cell) for cell in found.get_row_at(row)] for row in range(found.row_count)]


def test_the_live_view_shows_workers_functions_and_calls():
    async def test(app, pilot):
        await shown_after(app, pilot, lambda app: app.shown["workers"][0]["calls_out_per_s"] is not None)
        await pilot.pause(0.2)
        workers = cells(app, "#workers")
        assert [row[0] for row in workers] == ["w0", "w1", "w2", "w3"] and workers[3][1] == "lost"
        assert cells(app, "#functions")[0][0] == "train.step" and cells(app, "#calls")[0][:3] == ["2.5 s", "w0", "w1"]
        assert not app.query_one("#metrics").display

    view(test)


def test_the_keys_of_the_live_view():
    async def test(app, pilot):
        await shown_after(app, pilot, lambda app: True)
        await pilot.press("s", "s", "s")
        await shown_after(app, pilot, lambda app: app.by == "queue" and cells(app, "#workers")[0][0] == "w1")
        looks = app.shown
        await pilot.press("enter")  # the cursor has stayed on w0, which is in the second row now
        await shown_after(app, pilot, lambda app: getattr(app.screen, "shown", ""))
        assert app.screen.shown.startswith("w0: process 1000 on node1") and "thread 1001" in app.screen.shown
        await shown_after(app, pilot, lambda app: app.shown is not looks)  # goes on beneath
        await pilot.press("escape")
        await shown_after(app, pilot, lambda app: app.query("#workers") and app.query_one("#workers").has_focus)
        await pilot.press("q")
        await shown_after(app, pilot, lambda app: not app.is_running)

    view(test)


def test_the_cursor_stays_on_its_worker():
    async def test(app, pilot):
        await shown_after(app, pilot, lambda app: True)
        await pilot.press("down")
        await shown_after(app, pilot, lambda app: app._selected(app.query_one("#workers")) == "w1")
        looks = app.shown
        await shown_after(app, pilot, lambda app: app.shown is not looks)
        assert app._selected(app.query_one("#workers")) == "w1"
        await pilot.press("s", "s", "s")
        await shown_after(app, pilot, lambda app: app.by == "queue")
        assert app._selected(app.query_one("#workers")) == "w1"

    view(test)


def test_the_live_view_goes_on_when_a_look_fails():
    class Failing(Group):
        def reports(self, **options):
            if len(self.moments) == 1:
                raise RuntimeError("the group has gone")
            return super().reports(**options)

    pytest.importorskip("textual", reason="textual is not installed (the extra torchrpc[top])")
    from torchrpc.cli._top_app import TopApp

    async def run():
        app = TopApp(Failing(moment(10.0, 500), moment(12.0, 1500)), 0.1, 2.0)
        async with app.run_test(size=(140, 40)) as pilot:
            await shown_after(app, pilot, lambda app: app.failure)
            assert app.failure == "the group has gone" and cells(app, "#workers")[0][0] == "w0"

    asyncio.run(run())
