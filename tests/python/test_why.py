"""`observe._why`: who waits for whom, from reports that are written by hand."""

import copy
import json
import time
from pathlib import Path

from observed_reports import call_in, call_out, circle, frame, report, thread, waits

import torchrpc
from torchrpc.observe import _reports, _why
from torchrpc.rpc._group.gather import digest_of


def kinds(explanation):
    return [finding["kind"] for finding in explanation["findings"]]


def only(explanation, kind):
    (finding,) = [each for each in explanation["findings"] if each["kind"] == kind]
    return finding


def test_no_file_of_the_package_is_code_of_the_program():
    package = Path(torchrpc.__file__).parent
    files = [path for path in package.rglob("*.py") if "_built" not in path.parts]
    assert len(files) > 50
    assert [path for path in files if _reports.is_in_program(thread(1, python=[frame("run", 1, str(path))]))] == []


def test_a_circle_of_three_workers_is_named_with_the_lines_of_its_code():
    explanation = _why.explain(circle())
    assert kinds(explanation) == ["deadlock"] and explanation["has_cycle"] and _why.exit_code(explanation) == 1
    finding = only(explanation, "deadlock")
    assert finding["text"] == "Deadlock: w0, w1 and w2 wait for each other in a circle."
    assert [(step["worker"], step["tid"], step["file"], step["line"], step["call"]) for step in finding["steps"]] == [
        ("w0", 1001, "/home/me/train.py", 17, 10),
        ("w1", 1101, "/home/me/train.py", 18, 11),
        ("w2", 1201, "/home/me/train.py", 19, 12),
    ]
    assert _why.text(explanation).split("\n") == [
        "Deadlock: w0, w1 and w2 wait for each other in a circle.",
        "",
        "The circle",
        *(
            f"  w{i}  thread {1001 + 100 * i} (torchrpc-pool), serving call {10 + (i + 2) % 3} of w{(i + 2) % 3}: "
            f"in pull (/home/me/train.py:{17 + i}) waits for the reply of w{(i + 1) % 3} to train.pull "
            f"(call {10 + i}, 3.0 s)"
            for i in range(3)
        ),
    ]
    assert json.loads(json.dumps(explanation)) == explanation


def test_the_first_time_out_is_named_that_ends_a_circle():
    reports = circle(left_s=56.8)
    reports["w1"]["calls_out"][0]["left_s"] = 7.25
    assert only(_why.explain(reports), "deadlock")["text"].endswith(" The time-out of a call ends it in 7.2 s.")


def test_who_waits_for_a_circle_from_outside_is_counted():
    reports = circle()
    reports["w0"]["threads"].append(thread(1002, waits=waits(99, "w1"), python=[frame("late")]))
    reports["w0"]["calls_out"].append(call_out(99, "w1", tid=1002))
    reports["w1"]["calls_in"].append(call_in(99, "w0", tid=1101))
    finding = only(_why.explain(reports), "deadlock")
    assert len(finding["steps"]) == 3 and " 1 other thread waits for them." in finding["text"]


def test_a_circle_that_was_not_there_a_moment_ago_is_no_deadlock():
    now, before = circle(), circle()
    before["w2"]["threads"][1]["waits"]["call"] = 77
    assert not _why.explain(now, earlier=before)["has_cycle"]
    assert _why.explain(now, earlier=circle())["has_cycle"]


def test_a_slow_call_is_no_deadlock():
    reports = circle()
    reports["w2"]["threads"][1] |= {"waits": None, "state": "R"}
    explanation = _why.explain(reports)
    assert kinds(explanation) == ["longest_wait"] and _why.exit_code(explanation) == 0
    assert "w2 that runs, using" not in only(explanation, "longest_wait")["text"]
    assert only(explanation, "longest_wait")["text"].endswith(
        "In the end it is w2 that runs in pull (/home/me/train.py:19)."
    )


def test_processor_time_tells_a_thread_that_runs_from_one_that_sleeps():
    before, now = circle(), circle()
    for reports, cpu_s, uptime_s in ((before, 1.0, 12.0), (now, 1.4, 12.5)):
        reports["w2"]["threads"][1] |= {"waits": None, "cpu_s": cpu_s}
        reports["w2"]["worker"]["uptime_s"] = uptime_s
    text = only(_why.explain(now, earlier=before), "longest_wait")["text"]
    assert text.endswith("it is w2 that runs in pull (/home/me/train.py:19), using 80% of a core.")
    now["w2"]["threads"][1]["cpu_s"] = 1.0
    assert "it is w2 that sleeps in pull" in only(_why.explain(now, earlier=before), "longest_wait")["text"]


def test_a_circle_through_a_lock():
    holder = thread(1001, python=[frame("push", 5)], waits=waits(10, "w1"))
    waiter = thread(
        1002, python=[frame("pull", 8)], serves=[("w1", 20)],
        lock={"text": "self.lock", "kind": "lock", "holders": [1001], "taken_at": ["/home/me/train.py:4"]},
    )  # fmt: skip
    reports = {
        "w0": report("w0", threads=[holder, waiter], out=[call_out(10, "w1")], into=[call_in(20, "w1", tid=1002)]),
        "w1": report(
            "w1",
            threads=[thread(1101, python=[frame("ask", 30)], waits=waits(20, "w0"), serves=[("w0", 10)])],
            out=[call_out(20, "w0")],
            into=[call_in(10, "w0", tid=1101)],
        ),
    }
    finding = only(_why.explain(reports), "deadlock")
    assert [(step["worker"], step["tid"]) for step in finding["steps"]] == [("w0", 1001), ("w1", 1101), ("w0", 1002)]
    assert finding["steps"][2]["text"] == (
        "thread 1002 (torchrpc-pool), serving call 20 of w1: in pull (/home/me/train.py:8) waits for the lock "
        "`self.lock`, which thread 1001 has taken at /home/me/train.py:4"
    )


def test_a_thread_that_takes_its_own_lock_again():
    lock = {"text": "lock", "kind": "lock", "holders": [1001]}
    reports = {"w0": report("w0", threads=[thread(1001, python=[frame("f")], lock=lock)])}
    assert only(_why.explain(reports), "deadlock")["text"] == "Deadlock: a thread of w0 waits for itself."


def test_a_semaphore_is_no_deadlock_while_one_holder_can_go_on():
    lock = {"text": "slots", "kind": "semaphore", "holders": [1001, 1002]}
    reports = {
        "w0": report("w0", threads=[thread(1001, lock=lock), thread(1002, state="R"), thread(1003, lock=lock)]),
    }
    assert not _why.explain(reports)["has_cycle"]
    reports["w0"]["threads"][1]["lock"] = lock
    assert _why.explain(reports)["has_cycle"]


def test_a_lock_without_a_known_holder_is_no_deadlock():
    reports = circle()
    reports["w2"]["threads"][1] |= {"waits": None, "lock": {"text": "lock", "kind": "lock", "holders": []}}
    finding = only(_why.explain(reports), "longest_wait")
    assert finding["text"].endswith("In the end w2 waits for the lock `lock` in pull (/home/me/train.py:19).")


def full(name, tids, serving, caller):
    """A worker whose pool has no thread left; each serves a call and waits for one."""
    return report(
        name,
        threads=[
            thread(tid, python=[frame("nested", 3)], serves=[(caller, call)], waits=waits(100 + call, caller))
            for tid, call in zip(tids, serving, strict=True)
        ],
        out=[call_out(100 + call, caller) for call in serving],
        into=[call_in(call, caller, tid=tid) for tid, call in zip(tids, serving, strict=True)],
        pool={"threads": 2, "idle": 0, "blocked": 2, "queued": 3, "size": 2, "max": 2, "strand_queued": 0},
    )


def test_a_circle_that_waits_for_another_circle_does_not_hide_it():
    first, second, third, fourth = (("thread", f"w{i}", 1) for i in range(4))
    graph = _why._Graph({})
    graph.edges = {
        first: _why.Edge([second, third], True, True, ""),
        second: _why.Edge([first], True, True, ""),
        third: _why.Edge([fourth], True, True, ""),
        fourth: _why.Edge([third], True, True, ""),
    }
    graph._stuck = set(graph.edges)
    assert graph.cycles() == [[first, second], [third, fourth]]


def test_two_full_pools_that_wait_for_each_other():
    reports = {"w0": full("w0", [1001, 1002], [1, 2], "w1"), "w1": full("w1", [1101, 1102], [3, 4], "w0")}
    explanation = _why.explain(reports)
    assert kinds(explanation) == ["deadlock", "full_pool", "full_pool"]
    assert only(explanation, "deadlock")["text"].startswith("Deadlock: w0 and w1 wait for each other in a circle.")
    assert any("3 calls in the queue" in step["text"] for step in only(explanation, "deadlock")["steps"])
    pool = next(each for each in explanation["findings"] if each["kind"] == "full_pool")["text"]
    assert pool == (
        "w0: the pool is full. 3 calls wait in the queue, because all 2 threads are busy, 2 of them waiting for calls "
        "of their own. Most of its threads are in nested (/home/me/train.py:3)."
    )


def test_a_busy_pool_that_goes_on_is_not_called_full():
    reports = {"w0": full("w0", [1001, 1002], [1, 2], "w1"), "w1": report("w1")}
    reports["w0"]["calls_in"][1]["age_s"] = 0.2
    assert "full_pool" not in kinds(_why.explain(reports))


def test_a_full_pool_of_which_one_thread_can_go_on_is_no_deadlock():
    reports = {"w0": full("w0", [1001, 1002], [1, 2], "w1"), "w1": full("w1", [1101, 1102], [3, 4], "w0")}
    reports["w1"]["threads"][1]["waits"] = None
    assert not _why.explain(reports)["has_cycle"]


def test_a_pool_that_may_grow_is_no_deadlock():
    reports = {"w0": full("w0", [1001, 1002], [1, 2], "w1"), "w1": full("w1", [1101, 1102], [3, 4], "w0")}
    for each in reports.values():
        each["pool"]["max"] = 1024
    assert not _why.explain(reports)["has_cycle"]


def barrier(name, age_s=8.0):
    return thread(
        1000 + 100 * int(name[1:]), name="python", python=[frame("main", 90)],
        waits={"kind": "barrier", "call": 0, "to": "", "text": "shutdown", "age_s": age_s},
    )  # fmt: skip


def test_the_straggler_of_a_barrier_is_named_with_what_its_main_thread_does():
    spinning = thread(1200, name="python", python=[frame("spin", 44)], state="R")
    reports = {
        "w0": report("w0", threads=[barrier("w0")]),
        "w1": report("w1", threads=[barrier("w1", 5.0)]),
        "w2": report("w2", threads=[spinning]),
    }
    explanation = _why.explain(reports)
    finding = only(explanation, "straggler")
    assert finding["text"] == "w0 and w1 wait for all workers in shutdown (8.0 s): w2 has not arrived."
    assert [step["text"] for step in finding["steps"]] == ["thread 1200 (python): in spin (/home/me/train.py:44) runs"]
    assert _why.exit_code(explanation) == 0


def test_a_gathering_of_all_workers_is_a_barrier_and_one_of_some_is_not():
    for names, is_barrier in ((["w0", "w1", "w2"], True), (["w0", "w1"], False)):
        gathering = barrier("w0")
        gathering["waits"]["text"] = f"_all_gather {digest_of(set(names))}-7"
        reports = {"w0": report("w0", threads=[gathering]), "w1": report("w1"), "w2": report("w2")}
        texts = [finding["text"] for finding in _why.explain(reports)["findings"]]
        assert texts == (["w0 waits for all workers in _all_gather (8.0 s): w1 and w2 have not arrived."] * is_barrier)


def test_the_part_of_shutdown_in_which_a_worker_waits_for_the_others_is_a_barrier():
    gather = frame("Gathering.run", 222, "/venv/torchrpc/rpc/_group/gather.py")
    inside = [gather, frame("_wait_all_workers", 258, "/venv/torchrpc/rpc/api.py"), frame("main", 3)]
    reports = {
        "w0": report("w0", threads=[thread(1000, python=inside, lock={"text": "e", "kind": "event", "holders": []})]),
        "w1": report("w1", threads=[thread(1100, python=inside, waits=waits(4, "w0", age_s=2.0))]),
        "w2": report("w2", threads=[thread(1200, python=[frame("spin", 44)], state="R")]),
    }
    finding = only(_why.explain(reports, earlier=copy.deepcopy(reports)), "straggler")
    assert finding["text"] == "w0 and w1 wait for all workers in shutdown (2.0 s): w2 has not arrived."
    assert "in spin" in finding["steps"][0]["text"]


def test_a_barrier_and_a_call_can_wait_for_each_other():
    lock = {"text": "lock", "kind": "lock", "holders": [1000]}
    reports = {
        "w0": report(
            "w0",
            threads=[barrier("w0"), thread(1001, python=[frame("served")], serves=[("w1", 5)], lock=lock)],
            into=[call_in(5, "w1", tid=1001)],
            members=("w0", "w1"),
        ),
        "w1": report(
            "w1",
            threads=[thread(1100, name="python", python=[frame("main")], waits=waits(5, "w0"))],
            out=[call_out(5, "w0")],
            members=("w0", "w1"),
        ),
    }
    assert only(_why.explain(reports), "deadlock")["text"].startswith("Deadlock: w0 and w1 wait for each other")
    # Another thread of w1's program may be the one that arrives.
    reports["w1"]["threads"].append(thread(1101, name="python", python=[frame("other")]))
    assert not _why.explain(reports)["has_cycle"]


def test_a_function_that_keeps_the_gil_is_named():
    reports = circle()
    reports["w1"]["threads"][1] |= {"waits": None, "state": "R", "python": [frame("spin", 12)]}
    reports["w1"]["gil"] = {"is_free": False, "waited_s": 0.3, "holder": 1101}
    explanation = _why.explain(reports)
    assert only(explanation, "gil")["text"] == (
        "w1: spin (/home/me/train.py:12) keeps the GIL (for 0.3 s at least): no other Python of w1 runs. "
        "w0 waits for it."
    )
    assert not explanation["has_cycle"] and _why.exit_code(explanation) == 3
    assert "In the end it is w1 that runs in spin" in only(explanation, "longest_wait")["text"]


def test_of_threads_that_run_while_the_gil_is_kept_the_one_that_uses_a_core_keeps_it():
    """Where Python does not say who keeps it. Threads that wait for the GIL wake up every few milliseconds."""
    before, now = circle(), circle()
    for reports, cpu_s, waiting_cpu_s, uptime_s in ((before, 1.0, 2.0, 12.0), (now, 1.45, 2.1, 12.5)):
        spinning = {"waits": None, "state": "R", "cpu_s": cpu_s, "python": [frame("spin", 12)]}
        reports["w1"]["threads"][1] |= spinning
        reports["w1"]["threads"].append(thread(1199, state="R", python=[frame("main")], cpu_s=waiting_cpu_s))
        reports["w1"]["worker"]["uptime_s"] = uptime_s
        reports["w1"]["gil"] = {"is_free": False, "waited_s": 0.3, "holder": 0}
    assert "spin (/home/me/train.py:12) keeps the GIL" in only(_why.explain(now, earlier=before), "gil")["text"]
    assert "w1: a function keeps the GIL" in only(_why.explain(now), "gil")["text"]  # one report does not tell
    now["w1"]["threads"][-1]["cpu_s"] = 2.4
    assert "w1: a function keeps the GIL" in only(_why.explain(now, earlier=before), "gil")["text"]


def test_a_call_that_did_not_reach_python_waits_for_the_gil():
    reports = circle()
    reports["w1"]["threads"][1] |= {"waits": None, "state": "R", "python": [frame("spin", 12)], "serves": []}
    reports["w1"]["calls_in"] = []
    reports["w1"]["gil"] = {"is_free": False, "waited_s": 0.3, "holder": 1101}
    steps = only(_why.explain(reports), "longest_wait")["steps"]
    assert steps[-2]["text"].endswith("(call 10, 3.0 s), which waits for the GIL of w1")
    assert "in spin" in steps[-1]["text"]


def test_workers_that_do_not_answer_and_lost_ones_are_named():
    reports = circle()
    reports["w1"] = TimeoutError("no answer within 2 s.")
    for name in ("w0", "w2"):
        reports[name]["members"] = [dict(row, is_living=row["name"] != "w3") for row in reports[name]["members"]]
        reports[name]["members"].append({"name": "w3", "id": 3, "is_member": True, "is_living": False})
    reports["w0"]["calls_out"].append(call_out(50, "w3"))
    reports["w3"] = ConnectionError("refused")  # A lost worker is named once.
    explanation = _why.explain(reports, members=["w0", "w1", "w2", "w3", "w4"])
    assert [finding["text"] for finding in explanation["findings"] if finding["kind"] in ("silent", "lost")] == [
        "w1 does not answer: no answer within 2 s.",
        "w4 belongs to the group, but gave no report.",
        "w3 is lost, as 2 of 2 workers say. 1 call to it is unanswered.",
    ]
    assert not explanation["has_cycle"] and _why.exit_code(explanation) == 3
    assert only(explanation, "longest_wait")["text"].endswith("In the end it is w1, which does not answer.")


def test_calls_that_nobody_serves_are_explained():
    for change, words in (
        ({"state": "held"}, "which w0 holds back because w1 has too many bytes waiting"),
        ({"state": "unsent"}, "which is not sent yet"),
        ({}, "which is on its way, or waits in a queue of w1"),
    ):
        reports = circle()
        reports["w1"] = report("w1")
        reports["w0"]["calls_out"][0] |= change
        finding = only(_why.explain(reports), "longest_wait")
        assert any(step["text"].endswith(words) for step in finding["steps"]), finding


def test_a_future_that_a_function_has_returned():
    reports = circle()
    reports["w1"]["calls_in"][0] |= {"state": "waiting", "tid": 0}
    reports["w1"]["threads"] = []
    finding = only(_why.explain(reports), "longest_wait")
    assert any("which has returned a future that is not complete" in step["text"] for step in finding["steps"])


def test_nothing_stands_still():
    reports = {f"w{i}": report(f"w{i}") for i in range(3)}
    explanation = _why.explain(reports)
    assert _why.text(explanation) == "Nothing stands still: no call in 3 workers waits longer than a second."
    assert _why.exit_code(explanation) == 0 and explanation["findings"] == []


def test_missing_and_unknown_fields_are_no_errors():
    assert _why.explain({"w0": {}, "w1": {"threads": None, "calls_out": [{}], "future": 1}})["findings"] == []
    reports = circle()
    for name in list(reports["w0"]):
        broken = copy.deepcopy(reports)
        del broken["w0"][name]
        _why.text(_why.explain(broken))
        broken["w0"][name] = None
        _why.text(_why.explain(broken))


def test_a_group_of_64_workers_is_explained_within_a_second():
    reports = {}
    for i in range(64):
        name, callee, caller = f"w{i}", f"w{(i + 1) % 64}", f"w{(i - 1) % 64}"
        reports[name] = report(
            name,
            threads=[
                thread(10000 * (i + 1) + k, python=[frame("f", k)], waits=waits(k, callee), serves=[(caller, k)])
                for k in range(1, 51)
            ],
            out=[call_out(k, callee) for k in range(1, 51)],
            into=[call_in(k, caller, tid=10000 * (i + 1) + k) for k in range(1, 51)],
            members=tuple(f"w{n}" for n in range(64)),
        )
    start = time.process_time()
    explanation = _why.explain(reports)
    assert explanation["has_cycle"] and time.process_time() - start < 10
    assert len(explanation["findings"]) == 6
    assert explanation["findings"][5]["text"] == "There are 45 more such circles."
    assert "other thread" not in explanation["findings"][0]["text"]
