"""`torchrpc top`: the numbers of a group, from its reports and slightly older ones. Pure functions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from . import _reports as reading
from ._reports import Report, Reports, age, number, plural, rows, size, table

MOST_CALLS = 10
SORTS = ("worker", "calls", "age", "queue", "memory", "rrefs")


def snapshot(reports: Reports, earlier: "Reports | None" = None, members: Sequence[str] = ()) -> dict[str, Any]:
    """Return what `top` shows, as plain data.

    Args:
        reports: the reports by worker.
        earlier: slightly older reports. Without them, and for a worker that has restarted, rates are None.
        members: the names of all workers that the group knows.

    Returns "workers" (one dictionary for each), "functions" (empty while the metrics of the workers are off), "calls"
    (the calls in flight, the oldest first, at most ten), "in_flight" (their number), "lost" and "silent" ({name: why}).
    """
    good, before = reading.answered(reports), reading.answered(earlier or {})
    lost = {
        str(row.get("name"))
        for report in good.values()
        for row in rows(report, "members")
        if row.get("is_living") is False
    } - good.keys()
    silent = reading.silent(reports) | {name: "no report" for name in members if name not in reports}
    workers = [_worker(name, report, before.get(name)) for name, report in good.items()]
    workers += [{"worker": name, "state": "lost"} for name in sorted(lost)]
    workers += [{"worker": name, "state": "silent"} for name in silent if name not in lost]
    calls = [
        {
            "age_s": number(row, "age_s"),
            "from": name,
            "to": row.get("to", ""),
            "call": row.get("call", 0),
            **_served(good, name, row),
        }
        for name, report in good.items()
        for row in rows(report, "calls_out")
    ]
    calls.sort(key=lambda row: -row["age_s"])
    return {
        "workers": workers,
        "functions": _functions(good, before),
        "calls": calls[:MOST_CALLS],
        "in_flight": len(calls),
        "lost": sorted(lost),
        "silent": {name: why for name, why in silent.items() if name not in lost},
    }


def _worker(name: str, report: Report, earlier: "Report | None") -> dict[str, Any]:
    worker, pool, rrefs = table(report, "worker"), table(report, "pool"), table(report, "rrefs")
    out, into = rows(report, "calls_out"), rows(report, "calls_in")
    passed = _passed_s(earlier, report)
    return {
        "worker": name,
        "state": "keeps the GIL" if table(report, "gil").get("is_free") is False else "ok",
        "host": worker.get("host", ""),
        "pid": int(number(worker, "pid")),
        "uptime_s": number(worker, "uptime_s"),
        "calls_out_per_s": _rate(earlier, report, "out", "calls"),
        "calls_in_per_s": _rate(earlier, report, "in", "calls"),
        "bytes_per_s": _sum(_rate(earlier, report, side, "bytes") for side in ("in", "out")),
        "in_flight_out": len(out),
        "in_flight_in": len(into),
        "oldest_s": max((number(row, "age_s") for row in [*out, *into]), default=0.0),
        "queued": reading.queued(report),
        "pool_threads": int(number(pool, "threads")),
        "pool_busy": int(number(pool, "threads") - number(pool, "idle")),
        "pool_blocked": int(number(pool, "blocked")),
        "held_calls": sum(int(number(row, "held_calls")) for row in rows(report, "connections")),
        "queued_reply_bytes": sum(int(number(row, "queued_reply_bytes")) for row in rows(report, "connections")),
        "connections": dict(Counter(_way(str(row.get("how", "?"))) for row in rows(report, "connections"))),
        "rrefs_owned": int(number(rrefs, "owned")),
        "rrefs_held": int(number(rrefs, "held")),
        "contexts": int(number(table(report, "autograd"), "contexts")),
        "rss_bytes": int(number(worker, "rss_bytes")),
        "cores": (number(worker, "cpu_s") - number(table(earlier, "worker"), "cpu_s")) / passed
        if earlier and passed
        else None,
    }


def _passed_s(earlier: "Report | None", report: Report) -> float:
    """Return the seconds between two reports of one worker; 0 without an earlier report or after a restart."""
    if earlier is None:
        return 0.0
    before, after = table(earlier, "worker"), table(report, "worker")
    if before.get("incarnation") != after.get("incarnation"):
        return 0.0
    return max(0.0, number(after, "uptime_s") - number(before, "uptime_s"))


def _rate(earlier: "Report | None", report: Report, side: str, what: str) -> "float | None":
    """Return the rate per second of a metric on one side between two reports; None if it is not known."""
    passed = _passed_s(earlier, report)
    if earlier is None or passed <= 0 or not rows(report, "functions"):
        return None
    totals = [
        sum(number(row, what) for row in rows(each, "functions") if row.get("side") == side)
        for each in (earlier, report)
    ]
    return max(0.0, totals[1] - totals[0]) / passed


def _sum(rates: Any) -> "float | None":
    found = [rate for rate in rates if rate is not None]
    return sum(found) if found else None


def _functions(reports: Mapping[str, Report], earlier: Mapping[str, Report]) -> list[dict[str, Any]]:
    """Return the functions that the workers serve, the most frequent ones first."""
    found: dict[str, dict[str, Any]] = {}
    for name, report in reports.items():
        passed = _passed_s(earlier.get(name), report)
        before: Counter[tuple[Any, Any]] = Counter()
        for row in rows(earlier.get(name, {}), "functions"):
            before[row.get("function"), row.get("peer")] += int(number(row, "calls")) if row.get("side") == "in" else 0
        for row in rows(report, "functions"):
            if row.get("side") != "in":
                continue
            made = found.setdefault(
                str(row.get("function")),
                {"function": str(row.get("function")), "calls": 0, "errors": 0, "in_flight": 0, "calls_per_s": None}
                | {"p50_s": 0.0, "p99_s": 0.0, "max_s": 0.0, "workers": set()},
            )
            calls = int(number(row, "calls"))
            # The reports have a median per peer, not over all peers: the largest of them is an upper bound.
            for what in ("p50_s", "p99_s", "max_s"):
                made[what] = max(made[what], number(row, what))
            made["calls"] += calls
            made["errors"] += int(number(row, "errors"))
            made["in_flight"] += int(number(row, "in_flight"))
            made["workers"].add(name)
            if passed:
                new = max(0, calls - before[row.get("function"), row.get("peer")])
                made["calls_per_s"] = (made["calls_per_s"] or 0.0) + new / passed
    for made in found.values():
        made["workers"] = sorted(made["workers"])
    return sorted(found.values(), key=lambda row: (-(row["calls_per_s"] or 0.0), -row["calls"]))


def _served(reports: Mapping[str, Report], caller: str, call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the function of a call and its state: "running" or "waiting" on the callee, else the caller's state."""
    callee = reports.get(str(call.get("to")), {})
    for row in rows(callee, "calls_in"):
        if row.get("from") == caller and row.get("call") == call.get("call"):
            return {"function": row.get("function", ""), "state": row.get("state", "")}
    return {"function": "", "state": call.get("state", "")}


def sorted_workers(shown: Mapping[str, Any], by: str) -> list[dict[str, Any]]:
    """Return the workers of a snapshot, sorted by a column: by name, or with the largest value first."""
    keys = {
        "worker": lambda row: 0,
        "calls": lambda row: -((row.get("calls_in_per_s") or 0) + (row.get("calls_out_per_s") or 0)),
        "age": lambda row: -row.get("oldest_s", 0),
        "queue": lambda row: -row.get("queued", 0),
        "memory": lambda row: -row.get("rss_bytes", 0),
        "rrefs": lambda row: -(row.get("rrefs_owned", 0) + row.get("rrefs_held", 0)),
    }
    return sorted(shown["workers"], key=lambda row: (keys[by](row), _natural(row["worker"])))


def _natural(name: str) -> tuple[str, int, str]:
    """Return a sort key that puts w2 before w10."""
    head = name.rstrip("0123456789")
    digits = name[len(head) :]
    return head, int(digits) if digits else -1, name


WORKER_COLUMNS = (
    "worker", "state", "out/s", "in/s", "bytes/s", "flight", "oldest", "queue", "pool", "rrefs", "graphs", "memory",
    "cpu", "connections",
)  # fmt: skip
FUNCTION_COLUMNS = ("function", "calls/s", "p50", "p99", "max", "calls", "errors", "in flight")
CALL_COLUMNS = ("oldest calls", "from", "to", "function", "state")


def worker_cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of one worker for `WORKER_COLUMNS`."""
    if row["state"] in ("lost", "silent"):
        return [row["worker"], row["state"], *[""] * (len(WORKER_COLUMNS) - 2)]
    ways = ", ".join(f"{count} {how}" for how, count in sorted(row["connections"].items()))
    return [
        row["worker"],
        row["state"],
        _per_s(row["calls_out_per_s"]),
        _per_s(row["calls_in_per_s"]),
        "-" if row["bytes_per_s"] is None else size(row["bytes_per_s"]),
        f"{row['in_flight_out']}+{row['in_flight_in']}",
        age(row["oldest_s"]) if row["oldest_s"] else "-",
        str(row["queued"]),
        f"{row['pool_busy']}/{row['pool_threads']}",
        f"{row['rrefs_owned']}+{row['rrefs_held']}",
        str(row["contexts"]),
        size(row["rss_bytes"]),
        "-" if row["cores"] is None else f"{row['cores']:.0%}",
        ways or "none",
    ]


def _way(how: str) -> str:
    """Return the kind of a connection: "shm", "tcp", "tcp encrypted", "unix", ..."""
    if "shared memory" in how or "shm" in how:
        return "shm"
    medium = next((each for each in ("tcp", "unix", "tensorpipe", "ucx") if each in how), how)
    return f"{medium} encrypted" if any(each in how for each in ("AES", "ChaCha", "TLS")) else medium


def function_cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of one function for `FUNCTION_COLUMNS`."""
    times = [age(row[what]) for what in ("p50_s", "p99_s", "max_s")]
    return [
        row["function"],
        _per_s(row["calls_per_s"]),
        *times,
        *(f"{row[w]:,}" for w in ("calls", "errors", "in_flight")),
    ]


def call_cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of one call for `CALL_COLUMNS`."""
    return [age(row["age_s"]), row["from"], str(row["to"]), row["function"] or "-", row["state"] or "-"]


def _per_s(rate: "float | None") -> str:
    return "-" if rate is None else f"{rate:,.0f}" if rate >= 9.95 else f"{rate:.1f}"


def summary(shown: Mapping[str, Any]) -> str:
    """Return one line about the whole group."""
    good = [row for row in shown["workers"] if row["state"] not in ("lost", "silent")]
    rates = [_sum(row[f"calls_{side}_per_s"] for row in good) for side in ("out", "in")]
    parts = [plural(len(good), "worker")]
    if rates[0] is not None:
        parts.append(f"{_per_s(rates[0])} calls/s")
    parts.append(f"{shown['in_flight']:,} in flight")
    parts.append(f"{size(sum(row['rss_bytes'] for row in good))} of memory")
    if shown["lost"]:
        parts.append(f"lost: {reading.listed(shown['lost'])}")
    if shown["silent"]:
        parts.append(f"silent: {reading.listed(sorted(shown['silent']))}")
    return ", ".join(parts)


def text(shown: Mapping[str, Any], by: str = "worker") -> str:
    """Return a snapshot as text."""
    parts = [
        summary(shown),
        reading.table_text(list(WORKER_COLUMNS), [worker_cells(row) for row in sorted_workers(shown, by)], left=2),
    ]
    if shown["functions"]:
        parts.append(
            reading.table_text(list(FUNCTION_COLUMNS), [function_cells(row) for row in shown["functions"][:20]])
        )
    else:
        parts.append(METRICS)
    if shown["calls"]:
        parts.append(reading.table_text(list(CALL_COLUMNS), [call_cells(row) for row in shown["calls"]], left=5))
    parts += [f"{name} does not answer: {why}" for name, why in shown["silent"].items()]
    return "\n\n".join(parts)


METRICS = "Calls per second and times by function are counted while metrics are on: TORCHRPC_METRICS=1."
