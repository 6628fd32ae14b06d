"""Spans of calls: one trace through several workers, with the right parents."""

import asyncio

import pytest
import torch
from waiting import eventually

import torchrpc.rpc as rpc
from torchrpc import autograd, observe
from torchrpc.rpc.functions import async_execution
from torchrpc.testing import workers

pytest.importorskip("opentelemetry.sdk")
import itertools

from opentelemetry import trace as api
from opentelemetry.sdk.trace import TracerProvider, sampling
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

NAME = f"{__name__}."

_exporter = _stop = None


def start_tracing(ratio=1.0):
    """Trace this process into memory."""
    global _exporter, _stop
    _exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampling.ParentBased(sampling.TraceIdRatioBased(ratio)))
    provider.add_span_processor(SimpleSpanProcessor(_exporter))
    _stop = observe.trace(provider)


def stop_tracing():
    _stop()


def exported():
    """The spans of this process, as plain dicts."""
    return [
        {
            "name": span.name.removeprefix(NAME),
            "kind": span.kind.name,
            "id": span.context.span_id,
            "trace": span.context.trace_id,
            "parent": span.parent.span_id if span.parent else None,
            "error": span.status.description if not span.status.is_ok else None,
            "worker": span.attributes.get("torchrpc.worker"),
            "peer": span.attributes.get("torchrpc.peer"),
            "start": span.start_time,
            "end": span.end_time,
            "state": span.context.trace_state.to_header(),
        }
        for span in _exporter.get_finished_spans()
    ]


def spans_of(names):
    """The spans of all workers, after tracing has stopped in each of them."""
    stop_tracing()
    found = []
    for name in names[1:]:
        rpc.rpc_sync(name, stop_tracing)
        found += rpc.rpc_sync(name, exported)
    found += exported()  # last: the span of an asynchronous call ends in a callback, a moment after the wait for it
    return [span for span in found if span["name"] not in ("start_tracing", "stop_tracing", "exported")]


@pytest.fixture(params=[3])
def group(request):
    with workers(request.param) as names:
        for name in names[1:]:
            rpc.rpc_sync(name, start_tracing)
        start_tracing()
        yield names
        _stop()


def chain(found):
    """The spans from the root to the leaf, if they are one chain."""
    by_parent = {span["parent"]: span for span in found}
    assert len(by_parent) == len(found), "two spans have one parent"
    spans, parent = [], None
    while parent in by_parent:
        spans.append(by_parent[parent])
        parent = spans[-1]["id"]
    assert len(spans) == len(found), "the spans are no one chain"
    return spans


def pass_on(route):
    """Call along a route of workers."""
    return rpc.rpc_sync(route[0], pass_on, args=(route[1:],)) + 1 if route else 0


@pytest.mark.parametrize("group", [3, 5], indirect=True)
def test_one_trace_shows_a_nested_call_through_all_workers(group):
    assert rpc.rpc_sync(group[1], pass_on, args=(group[2:],)) == len(group) - 2
    spans = chain(spans_of(group))
    assert len({span["trace"] for span in spans}) == 1
    assert [span["kind"] for span in spans] == ["CLIENT", "SERVER"] * (len(group) - 1)
    assert {span["name"] for span in spans} == {"pass_on"}
    hops = [(span["worker"], span["peer"]) for span in spans]
    expected = []
    for caller, callee in itertools.pairwise(group):
        expected += [(caller, callee), (callee, caller)]
    assert hops == expected
    for outer, inner in itertools.pairwise(spans):
        assert outer["start"] <= inner["start"] and inner["end"] <= outer["end"]


async def pass_on_async(route):
    await asyncio.sleep(0)  # the span is current after a suspension, too
    return await rpc.rpc_async(route[0], pass_on_async, args=(route[1:],)) + 1 if route else 0


@async_execution
def pass_on_future(route):
    if not route:
        future = torch.futures.Future()
        future.set_result(0)
        return future
    return rpc.rpc_async(route[0], pass_on_future, args=(route[1:],))


@pytest.mark.parametrize("function", [pass_on_async, pass_on_future])
def test_async_functions_keep_the_parents(group, function):
    rpc.rpc_async(group[1], function, args=(group[2:],)).wait()
    spans = chain(spans_of(group))
    assert [span["kind"] for span in spans] == ["CLIENT", "SERVER"] * 2
    assert [span["worker"] for span in spans] == ["worker0", "worker1", "worker1", "worker2"]


def twice(x):
    return 2 * x


@async_execution
def call_twice(to):
    return rpc.rpc_async(to, twice, args=(1,)).then(lambda done: rpc.rpc_sync(to, twice, args=(done.value(),)))


def test_calls_in_callbacks_of_futures_are_children_of_the_function(group):
    assert rpc.rpc_sync("worker1", call_twice, args=("worker2",)) == 4
    found = spans_of(group)
    [served] = [span for span in found if (span["name"], span["kind"]) == ("call_twice", "SERVER")]
    calls = [span for span in found if (span["name"], span["kind"]) == ("twice", "CLIENT")]
    assert [span["parent"] for span in calls] == [served["id"]] * 2
    assert served["end"] >= max(span["end"] for span in calls)
    assert len({span["trace"] for span in found}) == 1 and len(found) == 6


def test_coroutines_of_different_traces_do_not_mix(group):
    futures = [rpc.rpc_async("worker1", pass_on_async, args=(["worker2"],)) for _ in range(20)]
    torch.futures.wait_all(futures)
    traces = {}
    for span in spans_of(group):
        traces.setdefault(span["trace"], []).append(span)
    assert len(traces) == 20
    for spans in traces.values():
        assert len(chain(spans)) == 4


def fail():
    raise ValueError("it is broken")


def test_an_error_is_in_the_spans_of_both_sides(group):
    with pytest.raises(ValueError):
        rpc.rpc_sync("worker1", fail)
    with pytest.raises(ValueError):
        rpc.rpc_async("worker1", fail).wait()
    spans = spans_of(group)
    assert len(spans) == 4
    assert all("it is broken" in span["error"] for span in spans)


@torch.jit.script
def script_twice(x):
    return x + x


def test_calls_that_run_without_python_have_spans_on_both_sides(group):
    rref = rpc.remote("worker1", torch.add, args=(torch.ones(2), 1))
    rref.to_here()
    rpc.rpc_sync("worker1", torch.mul, args=(torch.ones(2), 1))
    assert rpc.rpc_sync("worker1", script_twice, args=(torch.ones(2),)).sum() == 4
    with pytest.raises(RuntimeError):
        rpc.rpc_sync("worker1", torch.mm, args=(torch.ones(2, 3), torch.ones(2, 3)))
    by_id, served = {}, []

    def have_ended():  # spans of calls without Python are made when these have ended on either side
        by_id.update({span["id"]: span for span in [*exported(), *rpc.rpc_sync("worker1", exported)]})
        served[:] = [span for span in by_id.values() if span["kind"] == "SERVER" and span["name"] != "exported"]
        return len(served) == 4 and all(span["parent"] in by_id for span in served)

    eventually(have_ended)
    assert sorted(span["name"].rsplit(".")[-1] for span in served) == [
        "aten::add", "aten::mm", "aten::mul", "script_twice"
    ]  # fmt: skip
    for span in served:
        caller = by_id[span["parent"]]
        assert caller["kind"] == "CLIENT"
        assert (span["worker"], span["peer"]) == ("worker1", "worker0")
        assert span["trace"] == caller["trace"]
        assert caller["start"] <= span["start"] <= span["end"] <= caller["end"]
        assert bool(span["error"]) == bool(caller["error"]) == (span["name"] == "aten::mm")


def test_a_call_is_the_child_of_the_spans_of_the_program(group):
    tracer = api.get_tracer("program", tracer_provider=observe._tracing._current.tracer_provider)
    with tracer.start_as_current_span("step") as step:
        with autograd.context() as context:
            x = torch.ones(2, requires_grad=True)
            loss = rpc.rpc_sync("worker1", torch.mul, args=(x, 2)).sum()
            autograd.backward(context, [loss])
        expected = step.get_span_context().span_id
    found = {span["name"]: span for span in spans_of(group) if span["kind"] != "SERVER"}
    assert found["aten::mul"]["parent"] == found["torchrpc.backward"]["parent"] == expected
    assert len({span["trace"] for span in found.values()}) == 1


def test_the_samplers_decision_holds_on_all_workers():
    with workers(3) as names:
        for name in names[1:]:
            rpc.rpc_sync(name, start_tracing)
        start_tracing(ratio=0.0)
        for _ in range(5):
            rpc.rpc_sync(names[1], pass_on, args=(names[2:],))
        assert spans_of(names) == []


def test_trace_state_travels(group):
    context = api.SpanContext(1 << 100, 1 << 50, True, api.TraceFlags(1), api.TraceState([("vendor", "x")]))
    with api.use_span(api.NonRecordingSpan(context)):
        rpc.rpc_sync("worker1", pass_on, args=(["worker2"],))
    spans = spans_of(group)
    assert len(spans) == 4
    assert {span["state"] for span in spans} == {"vendor=x"}
    assert {span["trace"] for span in spans} == {1 << 100}


def test_nothing_is_traced_when_it_is_off(group):
    rpc.rpc_sync("worker1", stop_tracing)
    stop_tracing()
    rpc.rpc_sync("worker1", pass_on, args=([],))
    assert spans_of(group) == []


def test_a_worker_that_traces_serves_one_that_does_not(group):
    stop_tracing()
    assert rpc.rpc_sync("worker1", pass_on, args=([],)) == 0
    [span] = spans_of(group)
    assert (span["kind"], span["parent"]) == ("SERVER", None)


def test_a_later_provider_replaces_an_earlier_one():
    first = observe.trace(TracerProvider())
    second = observe.trace(TracerProvider())
    first()  # ends nothing any more
    assert observe._tracing._current is not None
    second()
    assert observe._tracing._current is None
