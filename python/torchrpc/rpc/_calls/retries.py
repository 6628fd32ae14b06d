"""How a call is repeated when its worker is lost: the policy of the program, and the tuple for the extension."""

import dataclasses
import math
import numbers
from typing import Any, TypeAlias

Retries: TypeAlias = "int | RetryPolicy"
Key: TypeAlias = str | bytes | None

_MAX_RETRIES = 1000
_MAX_KEY_BYTES = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often, and when, a call is sent again: `rpc_sync(..., retries=RetryPolicy(retries=5))`.

    A call is sent again only if the connection to its worker ended, or could not be opened, before the answer arrived,
    or if the worker shuts down and has refused the call. An answer ends the call, and so does an exception that the
    function raised. All attempts together take no longer than the time-out of the call. The worker runs the function
    once, however often the call arrives.

    Args:
        retries (int): how often the call may be sent again, at most 1,000.
        first_delay_s (float): seconds before the second attempt. Each further pause is twice as long as the one before.
            Each pause is shortened by a random part, at most half of it.
        max_delay_s (float): seconds of the longest pause.
        after_restart (bool): if the worker has been started again under its name, send the call to the new process even
            if the earlier process may have run it. The new process does not know what the earlier one ran, so the
            function may run twice.
        breaker_losses (int): after this number of consecutive losses of one worker, new calls with retries to it fail
            at once, for `breaker_cooldown_s` after the last loss; then one call tries again. 0: never.
        breaker_cooldown_s (float): seconds; see `breaker_losses`.

    Raises:
        TypeError: an argument of another type.
        ValueError: a number out of range.

    Immutable: any thread may use it.
    """

    retries: int = 3
    first_delay_s: float = 0.05
    max_delay_s: float = 2.0
    after_restart: bool = False
    breaker_losses: int = 8
    breaker_cooldown_s: float = 1.0

    __module__ = "torchrpc.rpc"

    def __post_init__(self) -> None:
        for name in ("retries", "breaker_losses"):
            _check_count(f"RetryPolicy({name}=...)", getattr(self, name))
        for name in ("first_delay_s", "max_delay_s", "breaker_cooldown_s"):
            value = getattr(self, name)
            if not isinstance(value, numbers.Real) or isinstance(value, bool):
                raise TypeError(f"RetryPolicy({name}=...) must be a number of seconds, but is {value!r}.")
            if not math.isfinite(value) or value < 0 or (value == 0 and name != "breaker_cooldown_s"):
                raise ValueError(f"RetryPolicy({name}=...) must be a positive number of seconds, but is {value!r}.")
        if self.max_delay_s < self.first_delay_s:
            raise ValueError(
                f"RetryPolicy(max_delay_s=...) must not be less than first_delay_s, but is {self.max_delay_s!r}."
            )
        if not isinstance(self.after_restart, bool):
            raise TypeError(f"RetryPolicy(after_restart=...) must be a bool, but is {self.after_restart!r}.")


def _check_count(what: str, value: Any) -> None:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{what} must be an int, but is a {type(value).__name__}: {value!r}.")
    if not 0 <= int(value) <= _MAX_RETRIES:
        raise ValueError(f"{what} must be between 0 and {_MAX_RETRIES}, but is {value}.")


def _key_bytes(key: Key) -> bytes:
    if key is None:
        return b""
    if not isinstance(key, str | bytes):
        raise TypeError(f"idempotency_key must be a str or bytes, but is a {type(key).__name__}: {key!r}.")
    raw = key.encode() if isinstance(key, str) else key
    if not 1 <= len(raw) <= _MAX_KEY_BYTES:
        raise ValueError(
            f"idempotency_key must have 1 to {_MAX_KEY_BYTES} bytes, but has {len(raw)}. Use a hash of longer ones."
        )
    return raw


def repetition_of(retries: Retries, key: Key) -> tuple[int, float, float, bool, int, float, bytes]:
    """Return the tuple that the extension takes: the fields of the policy, then the key as bytes (empty: no key)."""
    if isinstance(retries, RetryPolicy):
        policy = retries
    else:
        _check_count("retries", retries)
        policy = RetryPolicy(retries=int(retries))
    return (
        int(policy.retries),
        float(policy.first_delay_s),
        float(policy.max_delay_s),
        policy.after_restart,
        int(policy.breaker_losses),
        float(policy.breaker_cooldown_s),
        _key_bytes(key),
    )
