"""The commands `stack`, `rrefs`, `why` and `top` on reports that are written by hand."""

import contextlib
import dataclasses
import json

import pytest
from observed_reports import call_in, circle, frame, report, thread

import torchrpc.observe
import torchrpc.rpc as rpc
from torchrpc import _untrusted
from torchrpc.__main__ import INSPECTING, USAGE
from torchrpc.cli import _target, rrefs, stack, top, why
from torchrpc.observe import _reports, _rrefs, _threads
from torchrpc.testing import free_port


@dataclasses.dataclass
class Member:
    name: str


class Group:
    """As `observe.Group`, of reports that are given."""

    def __init__(self, *moments):
        self.moments = list(moments)
        self.members = [Member(name) for name in moments[0]]

    def reports(self, stacks=False, rrefs=False, timeout=2.0):
        return self.moments.pop(0) if len(self.moments) > 1 else self.moments[0]

    def report(self, name, **options):
        found = self.reports(**options)[name]
        if isinstance(found, Exception):
            raise found
        return found

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass


@pytest.fixture
def attach(monkeypatch):
    """Gives a function that sets what `attach` returns; what it was called with is in `asked`."""

    def set_moments(*moments):
        def attach(address=None, **options):
            set_moments.asked.append((address, options))
            return Group(*moments)

        monkeypatch.setattr(torchrpc.observe, "attach", attach)
        monkeypatch.setattr(_target, "check_listens", lambda address, timeout_s: None)

    set_moments.asked = []
    return set_moments


def test_the_usage_names_all_commands():
    assert all(name in USAGE for name in INSPECTING)


def test_why_names_a_circle_and_ends_with_1(attach, capsys):
    attach(circle(), circle())
    assert why.main(["host:29500"]) == 1
    assert capsys.readouterr().out.startswith("Deadlock: w0, w1 and w2 wait for each other in a circle.\n")
    assert attach.asked == [("host:29500", {"pid": None, "secret_file": None, "identity": None, "timeout": 5.0})]
    attach(circle(), circle())
    assert why.main(["--pid", "7", "--json", "--secret-file", "s", "--identity", "i"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["kind"] == "deadlock"
    assert attach.asked[-1] == (None, {"pid": 7, "secret_file": "s", "identity": "i", "timeout": 5.0})


def test_why_takes_two_looks_for_a_circle(attach, capsys):
    passing = circle()
    passing["w1"]["threads"][1]["waits"]["call"] = 77
    attach(passing, circle())
    assert why.main(["host:29500"]) == 0
    assert "Deadlock" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["host:1", "--pid", "2"], "Give an address or --pid, not both."),
        (["host:1", "--timeout", "0"], "--timeout is 0.0. It must be more than 0 seconds."),
        (["host:1"], "no group has formed at host:1 yet."),
    ],
)
def test_errors_are_one_sentence_and_end_with_2(monkeypatch, capsys, arguments, words):
    def attach(*args, **options):
        raise ValueError("no group has formed at host:1 yet")

    monkeypatch.setattr(torchrpc.observe, "attach", attach)
    monkeypatch.setattr(_target, "check_listens", lambda address, timeout_s: None)
    with pytest.raises(SystemExit) as exit:
        why.main(arguments)
    assert exit.value.code == 2 and capsys.readouterr().err == f"{words}\n"


def test_an_address_where_nothing_listens(capsys):
    for address, words in (
        (f"127.0.0.1:{free_port()}", "cannot be reached: "),
        ("localhost", "'localhost' is no address. Give host:port"),
        ("127.0.0.1:99999999", "cannot be reached: "),
        ("no-such-host.invalid:1", "cannot be reached: "),
    ):
        with pytest.raises(SystemExit) as exit:
            why.main([address])
        assert exit.value.code == 2 and words in capsys.readouterr().err


def test_the_default_is_the_store_of_the_environment_or_the_one_group_of_this_machine(monkeypatch, capsys):
    monkeypatch.setenv("MASTER_ADDR", "::1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert _target.default_target() == ("[::1]:29500", None)
    monkeypatch.delenv("MASTER_ADDR")
    cards = [(9, {"secret": "a", "name": "w1"}), (7, {"secret": "a", "name": "w0"})]
    monkeypatch.setattr(_target, "worker_cards", lambda: iter(cards))
    assert _target.default_target() == (None, 7)
    cards.append((11, {"secret": "b", "name": "other"}))
    with pytest.raises(SystemExit):
        _target.default_target()
    assert capsys.readouterr().err == (
        "Several groups run on this machine. Give --pid of a worker of one of them: 7 (w0), 9 (w1); 11 (other).\n"
    )
    cards.clear()
    with pytest.raises(SystemExit):
        _target.default_target()
    assert capsys.readouterr().err.startswith("No worker of this user runs on this machine.")


def test_stack_shows_what_each_thread_serves_and_awaits(attach, capsys):
    reports = circle()
    reports["w0"]["threads"] += [
        thread(1002, name="tp-loop"),
        thread(1003, name="tp-loop"),
        thread(1004, name="torchrpc-pool"),
        thread(
            1005,
            python=[frame("push", 7)],
            state="S",
            lock={"text": "self.lock", "kind": "lock", "holders": [], "holder_idents": [55], "taken_at": ["/x.py:3"]},
        ),
    ]
    reports["w0"]["threads"][1]["ident"] = 55
    reports["w1"] = report("w1", threads=[thread(1101, python=[frame("spin")], state="R")])
    reports["w1"]["gil"] = {"is_free": False}
    reports["w1"]["calls_in"] = [call_in(10, "w0", "train.fetch", state="waiting")]
    reports["w2"] = TimeoutError("no answer")
    attach(reports)
    assert stack.main(["host:1"]) == 0
    assert capsys.readouterr().out == (
        "w0: process 1000 on node1, up 12 s\n"
        "  thread 1000 python: sleeps\n"
        "      main (/home/me/train.py:90)\n"
        "  thread 1001 torchrpc-pool: sleeps\n"
        "    serves call 12 train.pull of w2 since 3.0 s\n"
        "    waits for the reply of w1 to train.fetch (since 3.0 s, call 10)\n"
        "      rpc_sync (/venv/torchrpc/rpc/_calls/sending.py:9)\n"
        "      pull (/home/me/train.py:17)\n"
        "  thread 1005 torchrpc-pool: sleeps\n"
        "    waits for the lock `self.lock`, held by thread 1001 since /x.py:3\n"
        "      push (/home/me/train.py:7)\n"
        "  3 threads without Python that do nothing: 2 tp-loop, 1 torchrpc-pool\n"
        "\n"
        "w1: process 1100 on node1, up 12 s\n"
        "  Thread 1101 keeps the GIL; the stacks were read without it.\n"
        "  thread 1101 torchrpc-pool: runs\n"
        "      spin (/home/me/train.py:1)\n"
        "  call 10 train.fetch of w0 since 3.0 s: its function has returned a future that is not complete\n"
        "\n"
        "w2 does not answer: no answer\n"
    )
    assert stack.main(["host:1", "--all", "--worker", "w0"]) == 0
    assert "thread 1002 tp-loop: sleeps" in (out := capsys.readouterr().out) and "w1: process" not in out
    assert stack.main(["host:1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["w2"] == {"error": "no answer"} and data["w0"]["threads"][1]["serves"] == [["w2", 12]]
    with pytest.raises(SystemExit):
        stack.main(["host:1", "--worker", "w9"])
    assert capsys.readouterr().err == "The group has no worker 'w9'. Its workers are w0, w1, w2.\n"


def rref(
    number, *, owner="w0", holders=("w1",), age_s=700.0, made_at="/home/me/train.py:88", type="Tensor", is_owner=True
):
    return {
        "id": f"1:{number}", "owner": owner, "is_owner": is_owner, "holders": list(holders), "age_s": age_s,
        "type": type, "has_value": True, "made_by": "w1", "made_at": made_at,
    }  # fmt: skip


def with_rrefs(**lists):
    reports = {f"w{i}": report(f"w{i}") for i in range(2)}
    for name, rows in lists.items():
        reports[name]["rrefs"] = {"owned": len(rows), "held": 0, "forks": 0, "list": rows}
    return reports


def test_a_thousand_rrefs_from_one_line_are_one_row(attach, capsys):
    leak = [rref(i, age_s=700.0 + i) for i in range(1000)]
    other = [rref(2000, holders=("w1", "w0"), made_at="/home/me/train.py:5", age_s=3.0)]
    users = [rref(i, is_owner=False, holders=()) for i in range(1000)]
    reports = with_rrefs(w0=leak + other, w1=users)
    attach(reports)
    assert rrefs.main(["host:1"]) == 0
    assert capsys.readouterr().out.split("\n") == [
        "owner  holders    type    made                        count  oldest  youngest",
        "w0     w1         Tensor  /home/me/train.py:88 by w1  1,000  28 min    12 min",
        "w0     w0 and w1  Tensor  /home/me/train.py:5 by w1       1   3.0 s     3.0 s",
        "",
        "1,001 RRefs. Most of them: 1,000 of type Tensor made at /home/me/train.py:88, owned by w0, held by w1; "
        "the oldest is 28 min old.",
        "",
    ]
    assert rrefs.main(["host:1", "--older-than", "10m", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["count"] for row in data["rrefs"]] == [1000] and data["rrefs"][0]["oldest_s"] == 1699.0
    assert data["rrefs"][0]["ids"][0] == "1:999" and len(data["rrefs"][0]["ids"]) == 10
    assert [row["count"] for row in _rrefs.groups(reports, 0.0, "w1")] == [1000, 1]
    assert rrefs.main(["host:1", "--older-than", "2h"]) == 0
    assert capsys.readouterr().out == "No RRefs older than 2.0 h.\n"
    assert rrefs.main(["host:1", "--worker", "w0"]) == 0


def test_where_an_rref_was_made_is_known_by_the_worker_that_has_made_it():
    owned = [rref(i, made_at="") for i in range(2)]
    held = [rref(i, made_at="/home/me/train.py:7", is_owner=False, holders=()) for i in range(2)]
    (row,) = _rrefs.groups(with_rrefs(w0=owned, w1=held))
    assert row["made_at"] == "/home/me/train.py:7" and row["holders"] == ["w1"]


def test_what_a_silent_owner_owns_is_shown_from_its_users():
    reports = with_rrefs(w1=[rref(i, is_owner=False, holders=()) for i in range(3)])
    assert _rrefs.groups(reports) == []
    reports["w0"] = TimeoutError("no answer")
    (row,) = _rrefs.groups(reports)
    assert row["count"] == 3 and "w0 does not answer: no answer\n" in _rrefs.text([row], reports)


def test_it_is_said_how_to_record_where_rrefs_are_made():
    reports = with_rrefs(w0=[rref(1, made_at="")])
    text = _rrefs.text(_rrefs.groups(reports), reports)
    assert text.endswith("1 RRef.\nWhere they were made is not recorded. " + _rrefs.ORIGINS)


@pytest.mark.parametrize("text", ["", "ten", "10x", "-1s", "1 2"])
def test_a_wrong_age_is_refused(text, capsys):
    with pytest.raises(SystemExit) as exit:
        rrefs.main([f"--older-than={text}"])
    assert exit.value.code == 2 and "Write 30s, 10m, 2h or 1d." in capsys.readouterr().err


def test_words():
    assert [_reports.age(s) for s in (-0.001, 0.0012, 0.32, 3.21, 42, 119, 600, 7300, 200000)] == [
        "0 ms", "1.2 ms", "0.3 s", "3.2 s", "42 s", "119 s", "10 min", "2.0 h", "2.3 days",
    ]  # fmt: skip
    assert [_reports.seconds(t) for t in ("5", "1.5s", "250ms", "10m", "10min", "2h", "1d")] == [
        5, 1.5, 0.25, 600, 600, 7200, 86400,
    ]  # fmt: skip
    assert [_reports.size(n) for n in (0, 1023, 1536, 200 << 20, 3 << 30)] == [
        "0 B", "1023 B", "1.5 KiB", "200 MiB", "3.0 GiB",
    ]  # fmt: skip
    assert _reports.listed([f"w{i}" for i in range(12)]) == "w0, w1, w2, w3, w4, w5, w6 and 5 others"


@pytest.mark.parametrize(
    ("file", "is_program"),
    [
        ("/home/me/train.py", True),
        ("/home/me/torchrpc/train.py", False),
        ("/venv/lib/python3.11/site-packages/torchrpc/rpc/_calls/sending.py", False),
        ("/usr/lib/python3.12/threading.py", False),
        ("/venv/lib/python3.11/site-packages/mylib/a.py", True),
        ("/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", True),
        ("<frozen runpy>", False),
        ("/tmp/ipykernel_7/1.py", True),
    ],
)
def test_which_frames_are_the_programs_own(file, is_program):
    assert _reports.is_in_program({"python": [frame("f", 1, file)]}) is is_program


def test_missing_fields_are_no_errors():
    for each in ({}, {"threads": [{}]}, {"rrefs": {"list": [{}]}}, {"threads": None, "rrefs": None, "gil": None}):
        assert "w0" in _threads.text({"w0": each}, show_all=True)
        found = _rrefs.groups({"w0": each})
        assert _rrefs.text(found, {"w0": each}).startswith("owner" if found else "No RRefs.")


EVIL = "\x1b]0;owned\x07\r\nworker9 \x9b31m\u202e"


def test_no_text_of_a_worker_or_a_file_reaches_the_terminal_as_a_command(attach, capsys):
    """`Group` makes the texts of reports printable; the commands those of errors."""
    texts = [EVIL, f"{EVIL}: {EVIL}"]
    for text in texts:
        shown = _untrusted.printable(text)
        assert "\n" not in shown and shown.isprintable() and "owned" in shown
    data = _untrusted.printable_data({EVIL: [{"file": EVIL, "line": 7}]})
    assert data == {
        texts_of_evil: [{"file": texts_of_evil, "line": 7}] for texts_of_evil in [_untrusted.printable(EVIL)]
    }
    attach({"worker0": rpc.NotAllowedError(EVIL)})
    for command in (stack, why, rrefs, top):
        with contextlib.suppress(SystemExit):
            command.main(["host:1", *(["--once", "--every", "0.05"] if command is top else [])])
        out, err = capsys.readouterr()
        assert "owned" in out + err
        assert all(char.isprintable() or char == "\n" for char in out + err)
        assert not any(line.startswith("worker9") for line in (out + err).splitlines())
