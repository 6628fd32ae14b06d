"""One Chrome trace out of those of several workers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]
Trace = dict[str, Any]

# The number of a call whose caller did not record.
UNNUMBERED = "-1:0"
# Calls overlap, which ranges of a thread may not: they get rows of their own, numbered from here (threads are below).
FIRST_ROW = 1 << 24


@dataclass
class WorkerTrace:
    name: str
    rank: int
    trace: Trace
    clock_ahead: int = 0  # nanoseconds, of its clock


def absolute_ns(trace: Trace, event: Event, end: bool = False) -> int:
    """When an event of that trace begins or ends, in nanoseconds since 1970: too many for a float."""
    microseconds = event["ts"] + (event.get("dur", 0) if end else 0)
    return int(trace.get("baseTimeNanoseconds", 0)) + round(microseconds * 1000)


def label(trace: Trace) -> Trace:
    """Say in the ranges of calls what their number stands for: the call, "caller's rank:its number", and the side."""
    for event in trace["traceEvents"]:
        args = event.get("args", {})
        if event.get("cat") == "user_annotation" and event["name"].startswith("rpc") and "Sequence number" in args:
            number = args.pop("Sequence number")
            args.pop("Fwd thread id", None)
            args["rpc_call"] = f"{(number >> 42) - 1}:{(number >> 1) & ((1 << 41) - 1)}"
            args["rpc_side"] = "callee" if number & 1 else "caller"
    return trace


def ranges(trace: Trace, side: str, call: str | None = None) -> Iterator[Event]:
    """The labelled ranges of calls on one side, "caller" or "callee"; only those of one call, if given."""
    for event in trace["traceEvents"]:
        args = event.get("args", {})
        if args.get("rpc_side") == side and call in (None, args["rpc_call"]):
            yield event


def merge(workers: list[WorkerTrace]) -> Trace:
    """Each worker becomes a process named after it, with times by the first worker's clock from the first event on;
    arrows lead from each call to what it runs.
    """
    events = [event for worker in workers for event in _events_of(worker)]
    start = min((event["ts"] for event in events if event["ph"] != "M"), default=0)
    for event in events:
        if event["ph"] != "M":
            event["ts"] = (event["ts"] - start) / 1000
    events += _arrows({"traceEvents": events})
    return {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": start, "traceEvents": events}


def _events_of(worker: WorkerTrace) -> list[Event]:
    """Its events as those of process `rank`, with the times they begin in nanoseconds since 1970."""
    pid = worker.rank
    rows = _rows(ranges(worker.trace, "caller"))
    events = [
        _label(pid, 0, "process_name", name=worker.name),
        _label(pid, 0, "process_sort_index", sort_index=pid),
    ]
    for event in worker.trace["traceEvents"]:
        if not isinstance(event.get("pid"), int):  # marks of the profiler's own
            continue
        if event["ph"] == "M":
            if event["name"].startswith("thread_"):
                events.append({**event, "pid": pid, "ts": 0})
            continue
        moved = {**event, "pid": pid}
        moved["ts"] = absolute_ns(worker.trace, event) - worker.clock_ahead
        if "id" in event:  # of arrows: unique in its own trace only
            moved["id"] = f"{worker.rank}/{event['id']}"
        if id(event) in rows:
            moved["tid"] = FIRST_ROW + rows[id(event)]
        events.append(moved)
    for row in sorted(set(rows.values())):
        events.append(_label(pid, FIRST_ROW + row, "thread_name", name="calls made"))
        events.append(_label(pid, FIRST_ROW + row, "thread_sort_index", sort_index=row - FIRST_ROW))
    return events


def _label(pid: int, tid: int, what: str, **args: Any) -> Event:
    return {"ph": "M", "name": what, "ts": 0, "pid": pid, "tid": tid, "args": args}


def _rows(calls: Iterator[Event]) -> dict[int, int]:
    """id() of each -> a row, such that those of a row do not overlap."""
    busy_until: list[float] = []
    rows = {}
    for event in sorted(calls, key=lambda event: event["ts"]):
        row = next((i for i, end in enumerate(busy_until) if end <= event["ts"]), len(busy_until))
        if row == len(busy_until):
            busy_until.append(0)
        busy_until[row] = event["ts"] + event["dur"]
        rows[id(event)] = row
    return rows


def _arrows(trace: Trace) -> Iterator[Event]:
    callers = {event["args"]["rpc_call"]: event for event in ranges(trace, "caller")}
    for served in list(ranges(trace, "callee")):
        call = served["args"]["rpc_call"]
        if call not in callers:
            continue
        arrow = {"cat": "rpc", "name": "rpc", "id": f"rpc {call}"}
        for phase, at in (("s", callers[call]), ("f", served)):
            yield {**arrow, "ph": phase, "bp": "e", **{key: at[key] for key in ("pid", "tid", "ts")}}
