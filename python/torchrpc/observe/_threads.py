"""`torchrpc stack`: what each thread of each worker does, from reports. Pure functions."""

from collections.abc import Mapping
from typing import Any

from torchrpc._untrusted import printable

from . import _reports as reading
from ._reports import Report, Reports, age, number, plural, rows

Functions = Mapping[tuple[str, str, int], str]  # (caller, callee, call) -> the function, from the callee's report


def text(reports: Reports, show_all: bool = False) -> str:
    """Return the threads of all workers as text. Without `show_all`, threads that serve no call, wait for nothing known
    and have no Python frames are only counted."""
    functions = {
        (str(row.get("from")), name, int(number(row, "call"))): str(row.get("function") or "")
        for name, report in reading.answered(reports).items()
        for row in rows(report, "calls_in")
    }
    parts = [
        _text_of_worker(name, report, show_all, functions)
        if isinstance(report, Mapping)
        else f"{name} does not answer: {printable(str(report))}"
        for name, report in reports.items()
    ]
    return "\n\n".join(parts)


def plain(reports: Reports) -> dict[str, Any]:
    """Return the threads as plain data: {worker: {"gil", "threads"}}, or {worker: {"error"}} if it did not answer."""
    return {
        name: {"gil": dict(reading.table(report, "gil")), "threads": rows(report, "threads")}
        if isinstance(report, Mapping)
        else {"error": str(report)}
        for name, report in reports.items()
    }


def _text_of_worker(name: str, report: Report, show_all: bool, functions: Functions) -> str:
    worker, gil = reading.table(report, "worker"), reading.table(report, "gil")
    lines = [
        f"{name}: process {worker.get('pid', '?')} on {worker.get('host', '?')}, up {age(number(worker, 'uptime_s'))}"
    ]
    if gil.get("is_free") is False:
        holder = f"Thread {tid} keeps" if (tid := reading.gil_holder(report)) else "A function keeps"
        lines.append(f"  {holder} the GIL; the stacks were read without it.")
    served = {(str(row.get("from")), int(number(row, "call"))): row for row in rows(report, "calls_in")}
    idle = []
    for thread in rows(report, "threads"):
        if show_all or _is_of_interest(thread):
            lines += _lines_of_thread(name, thread, served, report, functions)
        else:
            idle.append(str(thread.get("name") or "?"))
    if idle:
        kinds = ", ".join(f"{idle.count(kind)} {kind}" for kind in dict.fromkeys(idle))
        lines.append(
            f"  {plural(len(idle), 'thread')} without Python that {'does' if len(idle) == 1 else 'do'} nothing: {kinds}"
        )
    waiting = [row for row in rows(report, "calls_in") if row.get("state") == "waiting"]
    for row in waiting:
        lines.append(f"  {_call(row)}: its function has returned a future that is not complete")
    return "\n".join(lines)


def _is_of_interest(thread: Mapping[str, Any]) -> bool:
    return bool(thread.get("serves") or thread.get("waits") or thread.get("lock") or rows(thread, "python"))


def _lines_of_thread(
    name: str,
    thread: Mapping[str, Any],
    served: Mapping[tuple[str, int], Mapping[str, Any]],
    report: Report,
    functions: Functions,
) -> list[str]:
    lines = [f"  thread {thread.get('tid', '?')} {thread.get('name') or ''}".rstrip() + f": {reading.state(thread)}"]
    for sender, call in thread.get("serves") or []:
        row = served.get((str(sender), int(call)), {"from": sender, "call": call})
        lines.append(f"    serves {_call(row)}")
    if isinstance(waits := thread.get("waits"), Mapping):
        function = functions.get((name, str(waits.get("to")), int(number(waits, "call"))), "")
        call = f", call {waits['call']}" if waits.get("call") else ""
        lines.append(f"    waits for {reading.wait_text(waits, function)} (since {age(number(waits, 'age_s'))}{call})")
    if isinstance(lock := thread.get("lock"), Mapping):
        lines.append(f"    {_lock(lock, report)}")
    for frame in rows(thread, "python"):
        lines.append(f"      {reading.place(frame)}")
    return lines


def _call(row: Mapping[str, Any]) -> str:
    function = f" {row['function']}" if row.get("function") else ""
    since = f" since {age(number(row, 'age_s'))}" if "age_s" in row else ""
    return f"call {row.get('call', '?')}{function} of {row.get('from', '?')}{since}"


def _lock(lock: Mapping[str, Any], report: Report) -> str:
    holders = [f"thread {holder}" for holder in reading.holders(report, lock)]
    is_held = bool(holders) and lock.get("kind") not in ("thread", "import")
    at = [each for each in lock.get("taken_at") or [] if each]
    held = f", held by {reading.listed(holders)}{f' since {at[0]}' if at else ''}" if is_held else ""
    return f"waits for {reading.lock_text(lock)}{held}"
