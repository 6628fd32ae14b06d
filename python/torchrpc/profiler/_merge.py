"""Merges the Chrome traces of several workers into one. Pure functions on traces as dicts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]
Trace = dict[str, Any]

# The id of a call whose caller did not record.
UNKNOWN_CALL = "-1:0"
# Ranges of one thread must not overlap, but calls do. So calls get rows of their own, with thread ids from this one on.
FIRST_ROW_TID = 1 << 24


@dataclass
class WorkerTrace:
    """The trace of one worker. Its clock is `clock_ahead_ns` nanoseconds ahead of the first worker's."""

    name: str
    rank: int
    trace: Trace
    clock_ahead_ns: int = 0


def absolute_ns(trace: Trace, event: Event, end: bool = False) -> int:
    """Return the begin or end of an event in nanoseconds since 1970, as an int: a float is not exact enough."""
    microseconds = event["ts"] + (event.get("dur", 0) if end else 0)
    return int(trace.get("baseTimeNanoseconds", 0)) + round(microseconds * 1000)


def label(trace: Trace) -> Trace:
    """Replace the sequence number in the ranges of calls by the call's id, "caller's rank:number", and the side."""
    for event in trace["traceEvents"]:
        args = event.get("args", {})
        if event.get("cat") == "user_annotation" and event["name"].startswith("rpc") and "Sequence number" in args:
            number = args.pop("Sequence number")
            args.pop("Fwd thread id", None)
            args["rpc_call"] = f"{(number >> 42) - 1}:{(number >> 1) & ((1 << 41) - 1)}"
            args["rpc_side"] = "callee" if number & 1 else "caller"
    return trace


def ranges(trace: Trace, side: str, call: str | None = None) -> Iterator[Event]:
    """Yield the labelled ranges of calls on one side, "caller" or "callee"; only those of one call, if given."""
    for event in trace["traceEvents"]:
        args = event.get("args", {})
        if args.get("rpc_side") == side and call in (None, args["rpc_call"]):
            yield event


def merge(workers: list[WorkerTrace]) -> Trace:
    """Return one trace in which each worker is a process with the worker's name.

    Times are microseconds since the first event, by the first worker's clock. An arrow leads from each call to the
    function that it runs.
    """
    events = [event for worker in workers for event in _events_of(worker)]
    start = min((event["ts"] for event in events if event["ph"] != "M"), default=0)
    for event in events:
        if event["ph"] != "M":
            event["ts"] = (event["ts"] - start) / 1000
    events += _arrows({"traceEvents": events})
    return {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": start, "traceEvents": events}


def _events_of(worker: WorkerTrace) -> list[Event]:
    """Return the worker's events as events of process `rank`, with "ts" in nanoseconds since 1970."""
    pid = worker.rank
    rows = _rows(ranges(worker.trace, "caller"))
    events = [
        _metadata_event(pid, 0, "process_name", name=worker.name),
        _metadata_event(pid, 0, "process_sort_index", sort_index=pid),
    ]
    for event in worker.trace["traceEvents"]:
        if not isinstance(event.get("pid"), int):  # the profiler's own markers
            continue
        if event["ph"] == "M":
            if event["name"].startswith("thread_"):
                events.append({**event, "pid": pid, "ts": 0})
            continue
        moved = {**event, "pid": pid}
        moved["ts"] = absolute_ns(worker.trace, event) - worker.clock_ahead_ns
        if "id" in event:  # the id of an arrow, unique only within its trace
            moved["id"] = f"{worker.rank}/{event['id']}"
        if id(event) in rows:
            moved["tid"] = FIRST_ROW_TID + rows[id(event)]
        events.append(moved)
    for row in sorted(set(rows.values())):
        events.append(_metadata_event(pid, FIRST_ROW_TID + row, "thread_name", name="calls made"))
        events.append(_metadata_event(pid, FIRST_ROW_TID + row, "thread_sort_index", sort_index=row - FIRST_ROW_TID))
    return events


def _metadata_event(pid: int, tid: int, kind: str, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "ts": 0, "pid": pid, "tid": tid, "args": args}


def _rows(calls: Iterator[Event]) -> dict[int, int]:
    """Return {id(event): row} such that the events of a row do not overlap."""
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
    """Yield the arrows from the ranges of callers to those of callees."""
    callers = {event["args"]["rpc_call"]: event for event in ranges(trace, "caller")}
    for served in list(ranges(trace, "callee")):
        call = served["args"]["rpc_call"]
        if call not in callers:
            continue
        arrow = {"cat": "rpc", "name": "rpc", "id": f"rpc {call}"}
        for phase, at in (("s", callers[call]), ("f", served)):
            yield {**arrow, "ph": phase, "bp": "e", **{key: at[key] for key in ("pid", "tid", "ts")}}
