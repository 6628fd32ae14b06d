"""The ranges of calls in profiles: on both workers, with the same name, on one time axis."""

import gzip
import itertools
import json
import threading

import pytest
import torch
from torch.autograd.profiler_legacy import profile as legacy_profile

import torchrpc._C
import torchrpc.autograd as dist_autograd
import torchrpc.profiler
import torchrpc.rpc as rpc
from torchrpc.profiler._merge import WorkerTrace, absolute_ns, merge
from torchrpc.rpc.constants import UNSET_RPC_TIMEOUT
from torchrpc.testing import workers


def twice(x):
    return torch.mul(x, 2)


def plus(rref, y):
    return rref.local_value() + y


def through(to, x):
    return rpc.rpc_sync(to, twice, args=(x,))


def fail():
    raise KeyError("no such thing")


@rpc.functions.async_execution
def later(to, x):
    return rpc.rpc_async(to, twice, args=(x,))


entered, let_go = threading.Event(), threading.Event()


def wait_to_be_let_go():
    entered.set()
    let_go.wait(30)
    return torch.ones(1).item()


def has_entered():
    return entered.wait(30)


def end_the_wait():
    let_go.set()


@pytest.fixture
def merged(tmp_path):
    def export(prof):
        prof.export_chrome_trace(tmp_path / "trace.json")
        return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

    return export


def sides(events, name):
    """Return [(range on the caller, range on the callee)] of the calls of that name, in their order."""
    pairs = {}
    for event in events:
        args = event.get("args", {})
        if event["name"] == name and "rpc_side" in args:
            pairs.setdefault(args["rpc_call"], {})[args["rpc_side"]] = event
    found = [(pair["caller"], pair["callee"]) for pair in pairs.values()]
    return sorted(found, key=lambda pair: pair[0]["ts"])


def is_inside(inner, outer, of=("ts", "dur")):
    start, duration = of
    return outer[start] <= inner[start] and inner[start] + inner[duration] <= outer[start] + outer[duration]


def operators_of(events, served):
    """Return the operators that ran inside that range, in its thread."""
    return {
        event["name"]
        for event in events
        if event.get("cat") == "cpu_op"
        and (event["pid"], event["tid"]) == (served["pid"], served["tid"])
        and is_inside(event, served)
    }


# --- One trace of several workers ---


def test_a_callee_s_range_lies_inside_its_caller_s_on_one_axis(merged):
    with workers(2), torchrpc.profiler.profile() as prof:
        rpc.rpc_sync("worker1", twice, args=(torch.ones(3),))
        rpc.rpc_async("worker1", twice, args=(torch.ones(3),)).wait()
        rpc.remote("worker1", twice, args=(torch.ones(3),)).to_here()
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(3), 1))
    events = merged(prof)
    for call, operator in [
        ("rpc_sync#twice", "aten::mul"),
        ("rpc_async#twice", "aten::mul"),
        ("rpc_remote#twice", "aten::mul"),
        ("rpc_sync#aten::add", "aten::add"),
    ]:
        [(caller, callee)] = sides(events, f"{call}(worker0 -> worker1)")
        assert (caller["pid"], callee["pid"]) == (0, 1)
        assert is_inside(callee, caller), (caller, callee)
        assert operator in operators_of(events, callee)
    assert "rpc#PYTHON_RREF_FETCH_CALL(worker0 -> worker1)" in {event["name"] for event in events}


def test_processes_are_named_after_the_workers(merged):
    with workers(3), torchrpc.profiler.profile() as prof:
        rpc.rpc_sync("worker2", twice, args=(torch.ones(3),))
    names = {event["pid"]: event["args"]["name"] for event in merged(prof) if event["name"] == "process_name"}
    assert names == {0: "worker0", 1: "worker1", 2: "worker2"}


def test_only_the_named_workers_are_recorded(merged):
    with workers(3), torchrpc.profiler.profile(workers=["worker2"]) as prof:
        rpc.rpc_sync("worker2", through, args=("worker1", torch.ones(3)))
    assert set(prof.traces) == {"worker0", "worker2"}
    assert sides(merged(prof), "rpc_sync#through(worker0 -> worker2)")


@pytest.mark.parametrize("function", [through, later])
def test_calls_made_by_calls_are_shown_inside_them(merged, function):
    with workers(3), torchrpc.profiler.profile() as prof:
        rpc.rpc_sync("worker1", function, args=("worker2", torch.ones(3)))
    events = merged(prof)
    mode = "sync" if function is through else "async"
    [(outer, _)] = sides(events, f"rpc_sync#{function.__name__}(worker0 -> worker1)")
    [(inner, served)] = sides(events, f"rpc_{mode}#twice(worker1 -> worker2)")
    assert is_inside(inner, outer)
    assert is_inside(served, inner)


def test_an_arrow_leads_from_each_call_to_its_function(merged):
    with workers(2), torchrpc.profiler.profile() as prof:
        for _ in range(3):
            rpc.rpc_sync("worker1", twice, args=(torch.ones(3),))
    events = merged(prof)
    arrows = [event for event in events if event.get("cat") == "rpc"]
    begins = {event["id"]: event for event in arrows if event["ph"] == "s"}
    ends = {event["id"]: event for event in arrows if event["ph"] == "f"}
    calls = sides(events, "rpc_sync#twice(worker0 -> worker1)")
    assert len(calls) == 3
    for caller, callee in calls:
        arrow = f"rpc {caller['args']['rpc_call']}"
        for end, at in ((begins[arrow], caller), (ends[arrow], callee)):
            assert [end[key] for key in ("pid", "tid", "ts")] == [at[key] for key in ("pid", "tid", "ts")]


def test_calls_at_the_same_time_do_not_overlap_in_a_row(merged):
    with workers(2), torchrpc.profiler.profile() as prof:
        torch.futures.wait_all([rpc.rpc_async("worker1", twice, args=(torch.ones(3),)) for _ in range(20)])
    rows = {}
    for caller, callee in sides(merged(prof), "rpc_async#twice(worker0 -> worker1)"):
        rows.setdefault(("caller", caller["tid"]), []).append(caller)
        rows.setdefault(("callee", callee["tid"]), []).append(callee)
    assert sum(len(events) for events in rows.values()) == 40
    for events in rows.values():
        events.sort(key=lambda event: event["ts"])
        for before, after in itertools.pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"]


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_both_workers_of_a_backward_pass_are_shown(merged, mode):
    with workers(2), dist_autograd.context() as context_id:
        x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        kept = rpc.remote("worker1", twice, args=(x,))
        loss = rpc.rpc_sync("worker1", plus, args=(kept, y)).sum()
        with torchrpc.profiler.profile() as prof:
            dist_autograd.backward(context_id, [loss], mode=mode)
    events = merged(prof)
    [whole] = [event for event in events if event["name"] == "torch::distributed::autograd::backward"]
    [(caller, callee)] = sides(events, "rpc#BACKWARD_AUTOGRAD_REQ(worker0 -> worker1)")
    assert is_inside(caller, whole)
    assert is_inside(callee, caller)
    assert any("MulBackward0" in name for name in operators_of(events, callee))
    # The gradient of y arrives in a request of worker1 to worker0; the last gradient, that of x, in a reply.
    [(back, there)] = sides(events, "rpc#BACKWARD_AUTOGRAD_REQ(worker1 -> worker0)")
    assert is_inside(there, back)


def test_the_local_profile_has_the_workers_calls(merged):
    with workers(2), torchrpc.profiler.profile() as prof:
        rpc.rpc_sync("worker1", twice, args=(torch.ones(3),))
    assert "rpc_sync#twice(worker0 -> worker1)" in {event.key for event in prof.key_averages()}


def test_failed_calls_end_in_the_profile(merged):
    with workers(2), torchrpc.profiler.profile() as prof:
        with pytest.raises(KeyError, match="no such thing"):
            rpc.rpc_sync("worker1", fail)
        with pytest.raises(RuntimeError, match="could not find destination"):
            rpc.rpc_sync("worker7", fail)
        rpc.rpc_sync("worker1", twice, args=(torch.ones(3),))
    events = merged(prof)
    assert len(sides(events, "rpc_sync#fail(worker0 -> worker1)")) == 1
    assert len(sides(events, "rpc_sync#twice(worker0 -> worker1)")) == 1


def test_a_call_still_under_way_is_cut_off_and_completes(merged):
    with workers(2):
        with torchrpc.profiler.profile() as prof:
            waiting = rpc.rpc_async("worker1", wait_to_be_let_go)
            assert rpc.rpc_sync("worker1", has_entered)
        rpc.rpc_sync("worker1", end_the_wait)
        assert waiting.wait() == 1
        with torchrpc.profiler.profile() as second:
            rpc.rpc_sync("worker1", twice, args=(torch.ones(3),))
    [(caller, callee)] = sides(merged(prof), "rpc_async#wait_to_be_let_go(worker0 -> worker1)")
    assert caller["dur"] > 0
    assert callee["dur"] > 0
    assert sides(merged(second), "rpc_sync#twice(worker0 -> worker1)")


def test_one_profile_at_a_time():
    with workers(2):
        second = torchrpc.profiler.profile()
        with torchrpc.profiler.profile(), pytest.raises(RuntimeError, match="worker0 already"):
            second.__enter__()
        with torchrpc.profiler.profile():
            pass


def test_unknown_workers_are_refused():
    with workers(1), pytest.raises(ValueError, match="worker5"), torchrpc.profiler.profile(workers=["worker5"]):
        pass


def test_an_error_of_the_block_ends_the_profile():
    with workers(2):
        with pytest.raises(ZeroDivisionError), torchrpc.profiler.profile():
            1 / 0  # noqa: B018
        with torchrpc.profiler.profile() as prof:
            pass
    assert set(prof.traces) == {"worker0", "worker1"}


def test_a_trace_can_be_compressed(tmp_path):
    with workers(1), torchrpc.profiler.profile() as prof:
        torch.ones(1)
    prof.export_chrome_trace(tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert "aten::ones" in {event["name"] for event in events}


def test_different_clocks_are_aligned():
    def trace(base, ts, side):
        args = {"rpc_call": "0:1", "rpc_side": side}
        event = {"ph": "X", "name": "call", "pid": 77, "tid": 5, "ts": ts, "dur": 4, "args": args}
        return {"baseTimeNanoseconds": base, "traceEvents": [event]}

    ahead = 3_000_000_000
    caller = WorkerTrace("a", 0, trace(10**18, 100.0, "caller"))
    callee = WorkerTrace("b", 1, trace(10**18 + ahead - 1_000_000, 1101.0, "callee"), clock_ahead_ns=ahead)
    [(first, second)] = sides(merge([caller, callee])["traceEvents"], "call")
    assert (first["ts"], second["ts"]) == (0, 1)
    assert absolute_ns(caller.trace, caller.trace["traceEvents"][0]) == 10**18 + 100_000


# --- torch's legacy profiler ---


def events_named(prof, name):
    return [event for event in prof.function_events if event.name == name]


def test_exceptions_keep_their_types_under_the_legacy_profiler():
    with workers(2), legacy_profile() as prof:
        for call in (lambda: rpc.rpc_sync("worker1", fail), lambda: rpc.rpc_async("worker1", fail).wait()):
            with pytest.raises(KeyError, match="no such thing"):
                call()
    assert len(events_named(prof, "rpc_sync#fail(worker0 -> worker1)")) == 1
    assert len(events_named(prof, "rpc_async#fail(worker0 -> worker1)")) == 1


def test_a_call_that_cannot_be_made_does_not_name_the_next_one():
    with workers(2), legacy_profile() as prof:
        with pytest.raises(TypeError):
            rpc.rpc_sync("worker1", twice, args=(threading.Lock(),))
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))
    remote = [event.name for event in prof.function_events if event.is_remote]
    assert any(name == "rpc_sync#aten::add(worker0 -> worker1)#remote_op: aten::add" for name in remote)
    assert not any("twice" in name for name in remote)


def test_a_call_that_ends_after_the_legacy_profile_does_no_harm():
    with workers(2):
        with legacy_profile():
            waiting = rpc.rpc_async("worker1", wait_to_be_let_go)
        assert rpc.rpc_sync("worker1", has_entered)
        rpc.rpc_sync("worker1", end_the_wait)
        assert waiting.wait() == 1
        with legacy_profile() as prof:
            rpc.rpc_sync("worker1", twice, args=(torch.ones(1),))
    assert len(events_named(prof, "rpc_sync#twice(worker0 -> worker1)")) == 1


def test_a_program_may_record_the_range_of_a_call_itself():
    with workers(2), legacy_profile() as prof:
        rpc.RemoteProfilerManager.set_current_profiling_key("mine")
        torchrpc._C._call_sync("worker1", twice, (torch.ones(1),), None, UNSET_RPC_TIMEOUT)
    assert "mine#remote_op: aten::mul" in {event.name for event in prof.function_events}


def test_remote_events_lie_inside_the_call():
    with workers(2), legacy_profile() as prof:
        rpc.rpc_sync("worker1", twice, args=(torch.ones(1),))
    name = "rpc_sync#twice(worker0 -> worker1)"
    [call] = events_named(prof, name)
    [mul] = events_named(prof, f"{name}#remote_op: aten::mul")
    assert mul.node_id == 1
    assert call.time_range.start <= mul.time_range.start
    assert mul.time_range.end <= call.time_range.end


PROGRAM = """
import torch
import torchrpc
import torchrpc.profiler
import torchrpc.rpc as rpc

if __name__ == "__main__":
    with torchrpc.local_group(2), torchrpc.profiler.profile():
        rpc.rpc_sync("worker1", torch.add, args=(1, 2))
"""


def test_a_profile_writes_no_lines_but_the_one_that_the_docs_explain(run_python, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    lines = run_python(program).stderr.splitlines()
    assert [
        line for line in lines if not line.startswith("ERROR: External init callback must run in same thread")
    ] == []
