"""Limits of the size of messages, quotas of callers, and the targets of the audit log."""

import dataclasses
import json
import logging
import numbers
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

AuditLogType: TypeAlias = str | os.PathLike[str] | logging.Logger | Callable[[dict[str, Any]], Any]


def _check_numbers(instance: Any) -> None:
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        what = f"{type(instance).__name__}({field.name}=...)"
        if value is None:
            continue
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            raise TypeError(f"{what} must be an int or None, but is a {type(value).__name__}: {value!r}.")
        if not 0 <= int(value) < 1 << 63:
            raise ValueError(f"{what} must not be negative, nor 2**63 or more, but is {value}.")


def _given(instance: Any) -> dict[str, int]:
    return {name: int(value) for name, value in dataclasses.asdict(instance).items() if value is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest messages that a worker sends and receives.

    Give all workers of a group the same limits: a message beyond the sender's limits raises SerializationError, but a
    message beyond the receiver's limits ends the connection. Memory for a message is allocated as its bytes arrive.

    Args:
        message_bytes (int): all parts of a message together; default: 1 TiB.
        head_bytes (int): everything but large tensors and buffers: pickles, texts, small tensors; default: 4 GiB.
        tensor_bytes (int): one tensor or buffer; default: 1 TiB.
        tensors (int): the number of tensors in a message; default: 1,048,576.

    Raises:
        TypeError: a limit is not an int.
        ValueError: a limit is negative, or 2**63 or more.
    """

    message_bytes: int | None = None
    head_bytes: int | None = None
    tensor_bytes: int | None = None
    tensors: int | None = None

    __module__ = "torchrpc.rpc"

    def __post_init__(self) -> None:
        _check_numbers(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quota:
    """How much of a worker one caller may use at a time. None means no limit.

    A request beyond the quota raises QuotaExceededError at the caller. Other callers are not affected.

    Args:
        calls (int): requests of the caller that this worker has not answered yet.
        bytes (int): the size of these requests.
        rrefs (int): values that this worker keeps because the caller has made them by `remote`.
        connections (int): connections that the caller has opened.

    Raises:
        TypeError: a number is not an int.
        ValueError: a number is negative, or 2**63 or more.
    """

    calls: int | None = None
    bytes: int | None = None
    rrefs: int | None = None
    connections: int | None = None

    __module__ = "torchrpc.rpc"

    def __post_init__(self) -> None:
        _check_numbers(self)


def limit_numbers(limits: Limits | None) -> dict[str, int]:
    """Return the limits for the core.

    Raises:
        TypeError: `limits` is not a Limits.
    """
    if limits is None:
        return {}
    if not isinstance(limits, Limits):
        raise TypeError(f"limits must be a Limits, but is a {type(limits).__name__}: {limits!r}.")
    return _given(limits)


def quota_numbers(quotas: Mapping[str, Quota] | None) -> list[tuple[str, list[int | None]]]:
    """Return the quotas for the core.

    Raises:
        TypeError: `quotas` is not a dict of patterns and Quotas.
        ValueError: a pattern is empty.
    """
    if quotas is None:
        return []
    if not isinstance(quotas, Mapping):
        raise TypeError(
            f"quotas must be a dict such as {{'client-*': Quota(calls=64)}}, but is a {type(quotas).__name__}."
        )
    found: list[tuple[str, list[int | None]]] = []
    for pattern, quota in quotas.items():
        if not isinstance(pattern, str) or not isinstance(quota, Quota):
            raise TypeError(f"quotas has {pattern!r}: {quota!r}; write patterns of names, with a Quota each.")
        if not pattern:
            raise ValueError("quotas has an empty pattern: write the names of callers, or '*'.")
        found.append((pattern, [quota.calls, quota.bytes, quota.rrefs, quota.connections]))
    return found


def audit_target(log: AuditLogType | None) -> tuple[str, Callable[[str], Any] | None]:
    """Return the path of an `audit_log` (or an empty string), and the function that takes its lines (or None).

    Raises:
        TypeError: `log` is not a path, a logger or a function.
    """
    if log is None:
        return "", None
    if isinstance(log, logging.Logger):
        logger = log
        return "", lambda line: logger.info("%s", line)
    if isinstance(log, str | os.PathLike):
        path = os.fspath(log)
        if not isinstance(path, str) or not path:
            raise ValueError(f"audit_log must be the path of a file, but is {log!r}.")
        return os.path.abspath(path), None
    if callable(log):
        function = log
        return "", lambda line: function(json.loads(line))
    raise TypeError(
        f"audit_log must be the path of a file, a logging.Logger or a function of a dict, but is a "
        f"{type(log).__name__}: {log!r}."
    )
