"""`torchrpc rrefs`: which RRefs exist, who holds them, how old they are and where they were made, from reports."""

from collections.abc import Mapping
from typing import Any

from . import _reports as reading
from ._reports import Reports, age, number, plural, rows

ORIGINS = "To record it, set TORCHRPC_RREF_ORIGINS=1 for the workers."


def groups(reports: Reports, older_than_s: float = 0.0, worker: str = "") -> list[dict[str, Any]]:
    """Return the RRefs of a group as rows, the largest row first. RRefs of one kind made at one line share a row.

    Args:
        reports: the reports by worker, with RRefs.
        older_than_s: leaves out younger RRefs.
        worker: if given, only RRefs that this worker owns, holds or has made.

    Each row has "count", "owner", "holders" (names), "type", "made_by", "made_at" ("file:line", or "" if it was not
    recorded), "oldest_s", "youngest_s", "with_value" and "ids" (of the oldest, at most ten).
    """
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    everything = [row for report in reading.answered(reports).values() for row in rows(report, "rrefs", "list")]
    # Only the worker that made an RRef knows where. The owner, which knows the holders, may be another worker.
    origins = {str(row.get("id")): str(row["made_at"]) for row in everything if row.get("made_at")}
    for row in everything:
        # Skip a user's entry if the owner answered: the owner's entry contains the same.
        if not row.get("is_owner") and isinstance(reports.get(str(row.get("owner"))), Mapping):
            continue
        holders = tuple(sorted(str(each) for each in row.get("holders") or []))
        if number(row, "age_s") < older_than_s:
            continue
        if worker and worker not in (row.get("owner"), row.get("made_by"), *holders):
            continue
        names = (str(row.get(name) or "") for name in ("owner", "type", "made_by"))
        found.setdefault((*names, holders, origins.get(str(row.get("id")), "")), []).append(row)
    result = []
    for (owner, kind, made_by, holders, made_at), members in found.items():
        members.sort(key=lambda row: -number(row, "age_s"))
        result.append(
            {
                "count": len(members),
                "owner": owner,
                "holders": list(holders),
                "type": kind,
                "made_by": made_by,
                "made_at": made_at,
                "oldest_s": number(members[0], "age_s"),
                "youngest_s": number(members[-1], "age_s"),
                "with_value": sum(bool(row.get("has_value")) for row in members),
                "ids": [str(row.get("id")) for row in members[:10]],
            }
        )
    return sorted(result, key=lambda row: (-row["count"], -row["oldest_s"]))


def text(found: list[dict[str, Any]], reports: Reports, older_than_s: float = 0.0) -> str:
    """Return the rows of `groups` as text for humans."""
    lines = [f"{name} does not answer: {reason}" for name, reason in reading.silent(reports).items()]
    older = f" older than {age(older_than_s)}" if older_than_s else ""
    if not found:
        return "\n".join([*lines, f"No RRefs{older}."])
    header = ["owner", "holders", "type", "made", "count", "oldest", "youngest"]
    cells = [
        [
            row["owner"],
            reading.listed(row["holders"], most=4) if row["holders"] else "nobody else",
            row["type"] or "?",
            _made(row),
            f"{row['count']:,}",
            age(row["oldest_s"]),
            age(row["youngest_s"]),
        ]
        for row in found
    ]
    lines.append(reading.table_text(header, cells, left=4))
    first, total = found[0], sum(row["count"] for row in found)
    lines += ["", f"{plural(total, 'RRef')}{older}."]
    if first["count"] > 1:
        who = reading.listed(first["holders"], most=4) if first["holders"] else f"the owner, {first['owner']}, itself"
        kind = f" of type {first['type']}" if first["type"] else ""
        at = f" made at {first['made_at']}" if first["made_at"] else ""
        lines[-1] += (
            f" Most of them: {first['count']:,}{kind}{at}, owned by {first['owner']}, held by {who}; "
            f"the oldest is {age(first['oldest_s'])} old."
        )
    if not any(row["made_at"] for row in found):
        lines.append(f"Where they were made is not recorded. {ORIGINS}")
    return "\n".join(lines)


def _made(row: Mapping[str, Any]) -> str:
    by = f"by {row['made_by']}" if row["made_by"] else ""
    return f"{row['made_at']} {by}".strip() or "?"
