"""The fields of a worker's report, and what remains of a report whose fields are of other kinds.

A worker can send anything as its report. What reads a report expects only that a field may be missing. So a field that
is not what it should be is removed when the report arrives.
"""

import math
from typing import Any

# What a field holds: a type; fields of a dictionary, which may have others, too; [what each element of a list holds];
# or the elements of a list of fixed length as a tuple.
_FRAME = {"function": str, "file": str, "line": int}
_WAITS = {"kind": str, "to": str, "call": int, "text": str, "age_s": float}
_LOCK = {"kind": str, "text": str, "holders": [int], "holder_idents": [int]}
_CALL = {
    **{"call": int, "from": str, "to": str, "kind": str, "function": str, "state": str, "tid": int, "bytes": int},
    **{"age_s": float, "left_s": float},
}
_MEMBER = {"name": str, "id": int, "incarnation": int, "address": str, "is_member": bool, "is_living": bool}
_THREAD = {
    **{"tid": int, "ident": int, "name": str, "state": str, "cpu_s": float, "waits": _WAITS, "lock": _LOCK},
    **{"serves": [(str, int)], "python": [_FRAME]},
}
_RREF = {
    **{"id": str, "owner": str, "made_by": str, "made_at": str, "type": str, "age_s": float},
    **{"is_owner": bool, "has_value": bool, "holders": [str]},
}
_REPORT = {
    "version": int,
    "worker": {"name": str, "id": int, "pid": int, "host": str, "uptime_s": float, "rss_bytes": int, "cpu_s": float},
    "members": [_MEMBER],
    "calls_out": [_CALL],
    "calls_in": [_CALL],
    "threads": [_THREAD],
    "gil": {"is_free": bool, "holder": int, "waited_s": float},
    "pool": {},
    "connections": [{"peer": str, "how": str, "has_unanswered": bool}],
    "rrefs": {"list": [_RREF]},
    "autograd": {},
    "metrics": {},
    "functions": [{"function": str, "peer": str, "side": str}],
}
_MISFIT = object()
_MOST = 2**63
_MAX_DEPTH = 20


def fitted(report: Any) -> dict[str, Any]:
    """Return the report with those of its fields that hold what they should; thread-safe, raises nothing."""
    fields = _fitted(report, _REPORT, 0)
    return fields if isinstance(fields, dict) else {}


def _fitted(value: Any, kind: Any, depth: int) -> Any:
    """Return what fits of the value; _MISFIT if nothing does. `kind`: None stands for any plain data."""
    if value is None:  # there is no time-out, no wait, no lock; a text is always there
        return None if kind is None or kind is float or isinstance(kind, dict) else _MISFIT
    if kind is None:
        kind = {} if isinstance(value, dict) else [None] if isinstance(value, list) else type(value)
    if depth > _MAX_DEPTH:
        return _MISFIT
    if isinstance(kind, dict):
        if not isinstance(value, dict):
            return _MISFIT
        texts = {name: each for name, each in value.items() if isinstance(name, str)}
        found = {name: _fitted(each, kind.get(name), depth + 1) for name, each in texts.items()}
        return {name: each for name, each in found.items() if each is not _MISFIT}
    if isinstance(kind, list):
        if not isinstance(value, list):
            return _MISFIT
        return [each for each in (_fitted(one, kind[0], depth + 1) for one in value) if each is not _MISFIT]
    if isinstance(kind, tuple):
        is_whole = isinstance(value, list) and len(value) == len(kind)
        parts = (
            [_fitted(one, each, depth + 1) for one, each in zip(value, kind, strict=True)] if is_whole else [_MISFIT]
        )
        return _MISFIT if _MISFIT in parts else parts
    return value if _is(value, kind) else _MISFIT


def _is(value: Any, kind: type) -> bool:
    """Whether the value is of that type, or is an int for a float, and a number that other programs can read."""
    if kind in (str, bool):
        return isinstance(value, kind)
    if not isinstance(value, int | float) or isinstance(value, bool) or (kind is int and not isinstance(value, int)):
        return False
    return kind in (int, float) and math.isfinite(value) and -_MOST <= value < _MOST
