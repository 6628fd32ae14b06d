"""Reads the reports of workers, and words their contents for the commands. Pure functions of reports.

A report is what `Group.reports` returns for a worker: nested dictionaries, or the exception of a worker that did not
answer. A worker with another version of torchrpc may send fewer or more fields.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torchrpc._frames import is_of_program
from torchrpc._untrusted import printable

Report = Mapping[str, Any]
Reports = Mapping[str, "Report | BaseException"]

_STATES = {"R": "runs", "S": "sleeps", "D": "waits for a disk or a driver", "T": "is stopped", "t": "is traced"}
_BUSY_CORES = 0.1  # a running thread uses at least this much, also on a machine that is busy with other programs


def answered(reports: Reports) -> dict[str, Report]:
    """Return the reports of the workers that answered."""
    return {name: report for name, report in reports.items() if isinstance(report, Mapping)}


def silent(reports: Reports) -> dict[str, str]:
    """Return {worker that did not answer: why}."""
    return {
        name: printable(f"{report}".rstrip(".")) or type(report).__name__
        for name, report in reports.items()
        if not isinstance(report, Mapping)
    }


def rows(report: Report, *names: str) -> list[Mapping[str, Any]]:
    """Return the list under these nested names of a report; empty if it is missing."""
    value: Any = report
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def table(report: Report, name: str) -> Mapping[str, Any]:
    """Return the dictionary under this name of a report; empty if it is missing."""
    value = report.get(name)
    return value if isinstance(value, Mapping) else {}


def number(row: Mapping[str, Any], name: str) -> float:
    """Return the number under this name (a text is parsed as a number); 0 if it is missing."""
    value = row.get(name)
    try:
        return float(value) if value is not None else 0.0
    except (TypeError, ValueError):
        return 0.0


def threads(report: Report) -> dict[int, Mapping[str, Any]]:
    """Return {thread id: the thread}."""
    return {int(number(row, "tid")): row for row in rows(report, "threads")}


def wait_text(waits: Mapping[str, Any], function: str = "") -> str:
    """Return what a thread waits for, in words. `function`: the function of the awaited call, if it is known."""
    kind, to, text = (str(waits.get(name) or "") for name in ("kind", "to", "text"))
    if kind == "reply" or (kind in ("future", "value") and waits.get("call") and to):
        function = function or text
        return f"the reply{f' of {to}' if to else ''}{f' to {function}' if function else ''}"
    names = {"future": "a future", "value": "the value of an RRef", "backward": "a backward pass"}
    return text or f"{names.get(kind, kind or 'something')}{f' of {to}' if to else ''}"


def is_pool_full(report: Report) -> bool:
    """Return whether a worker's pool starts no task although some wait: see Note [Limit of threads] of the core."""
    pool = table(report, "pool")
    threads, idle = number(pool, "threads"), number(pool, "idle")
    is_at_limit = threads - idle - number(pool, "blocked") >= number(pool, "size") or threads >= number(pool, "max")
    return queued(report) > 0 and idle == 0 and threads > 0 and is_at_limit


def queued(report: Report) -> int:
    """Return how many tasks wait for a thread. Python's tasks wait in a strand, itself one task of the pool."""
    pool = table(report, "pool")
    strand = int(number(pool, "strand_queued"))
    return strand + max(0, int(number(pool, "queued")) - bool(strand))


def lock_text(lock: Mapping[str, Any]) -> str:
    """Return a Python lock in words: "the lock `self.lock`"."""
    kinds = {"lock": "the lock", "semaphore": "the semaphore", "condition": "a notification of", "event": "the event"}
    kind, expression = str(lock.get("kind", "lock")), str(lock.get("text", "?"))
    if kind == "barrier":
        return f"the other threads at `{expression}`"
    return f"{kinds[kind]} `{expression}`" if kind in kinds else expression


def digest_of(names: Iterable[str]) -> str:
    """Return a digest of a set of names, as `rpc._group.gather` computes it for the name of a gathering."""
    return hashlib.blake2b("\0".join(sorted(names)).encode(), digest_size=16).hexdigest()


def shutdown_of(thread: Mapping[str, Any]) -> bool:
    """Return whether a thread is in the part of shutdown() that waits for all workers."""
    return any(
        row.get("function", "").rpartition(".")[2] == "_wait_all_workers" and "torchrpc" in str(row.get("file"))
        for row in rows(thread, "python")
    )


def holders(report: Report, lock: Mapping[str, Any]) -> list[int]:
    """Return the ids of the threads that hold a lock. Of threads that C++ started, Python knows only the idents."""
    found = [int(each) for each in lock.get("holders") or []]
    idents = set(lock.get("holder_idents") or [])
    found += [tid for tid, row in threads(report).items() if row.get("ident") in idents and tid not in found]
    return found


def gil_holder(report: Report, earlier: "Report | None" = None) -> int:
    """Return the id of the thread that keeps the GIL; 0 if no thread keeps it, or the thread is not known.

    Args:
        earlier: a slightly older report of the same worker, if there is one.
    """
    gil = table(report, "gil")
    if gil.get("is_free") is not False:
        return 0
    if holder := int(number(gil, "holder")):
        return holder
    # Threads that wait for the GIL wake up every few milliseconds to ask for it, but they use little processor time.
    in_python = [tid for tid, row in threads(report).items() if rows(row, "python")]
    used = sorted(((cores(earlier, report, tid) or 0.0, tid) for tid in in_python), reverse=True)
    if used and used[0][0] >= _BUSY_CORES and all(4 * each < used[0][0] for each, _ in used[1:]):
        return used[0][1]
    running = [tid for tid in in_python if threads(report)[tid].get("state") == "R"]
    return running[0] if len(running) == 1 else 0


def program_frame(thread: Mapping[str, Any]) -> "Mapping[str, Any] | None":
    """Return the innermost frame in the program's own code, else the innermost frame; None without Python frames."""
    frames = rows(thread, "python")
    return next((each for each in frames if is_of_program(str(each.get("file", "")))), frames[0] if frames else None)


def is_in_program(thread: Mapping[str, Any]) -> bool:
    """Return whether a thread has a frame in the program's own code."""
    frame = program_frame(thread)
    return frame is not None and is_of_program(str(frame.get("file", "")))


def place(frame: "Mapping[str, Any] | None") -> str:
    """Return a frame as "function (file:line)"; "" without a frame."""
    if frame is None:
        return ""
    return f"{frame.get('function', '?')} ({frame.get('file', '?')}:{frame.get('line', '?')})"


def state(thread: Mapping[str, Any], cores: "float | None" = None) -> str:
    """Return the state of a thread in words: "runs", "sleeps", ... `cores`: the processor time it uses, in cores."""
    letter = str(thread.get("state", ""))[:1]
    if cores is not None and (cores >= 0.05 or letter == "R"):
        return f"runs, using {cores:.0%} of a core"
    return _STATES.get(letter, "sleeps")


def cores(earlier: "Report | None", report: Report, tid: int) -> "float | None":
    """Return the processor time of a thread between two reports, in cores; None if it is not known."""
    if earlier is None:
        return None
    before, after = threads(earlier).get(tid), threads(report).get(tid)
    passed = number(table(report, "worker"), "uptime_s") - number(table(earlier, "worker"), "uptime_s")
    if before is None or after is None or passed < 0.02:
        return None
    return max(0.0, number(after, "cpu_s") - number(before, "cpu_s")) / passed


def age(seconds: float) -> str:
    """Return a time for humans: "320 ms", "3.2 s", "12 min", "3.4 h", "2.1 days"."""
    seconds = max(0.0, seconds)  # negative if a call began after the report
    if seconds < 0.0995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"


def seconds(text: str) -> float:
    """Return the seconds of "10", "10s", "10m", "2h" or "1d". Raises ValueError for other texts."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)?", text.strip())
    if not match:
        raise ValueError(f"{text!r} is no time. Write 30s, 10m, 2h or 1d.")
    return float(match[1]) * {"ms": 1e-3, "m": 60, "min": 60, "h": 3600, "d": 86400}.get(match[2] or "s", 1.0)


def size(count: float) -> str:
    """Return a number of bytes for humans: "512 B", "1.5 KiB", "3.2 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1023.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def listed(names: "list[str]", most: int = 8) -> str:
    """Return names as part of a sentence: "w0", "w0 and w1", "w0, w1 and 12 others"."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} others"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "nobody"


def plural(count: int, noun: str) -> str:
    """Return a number with its noun: "1 call", "2 calls"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def table_text(header: "list[str]", lines: "list[list[str]]", left: int = 1) -> str:
    """Return a table as text. The first `left` columns are aligned on the left, the others on the right."""
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    texts = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in [header, *lines]
    ]
    return "\n".join(text.rstrip() for text in texts)
