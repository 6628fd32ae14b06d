"""The options of health checks."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, kw_only=True)
class HealthOptions:
    """Health checks over HTTP, for Kubernetes, load balancers and curl.

    GET /healthz returns 200 while this worker serves calls, and 503 with a reason while its group forms, while it shuts
    down, and when `check` returns a reason. Everyone with a route to the port may ask.

    Args:
        address (str or int): where to listen: a port, on all addresses of this host, or `"127.0.0.1:8080"` with a
            numeric host. Port 0: any free port, see `torchrpc.observe.health_address`.
        check (function): your own check. Returns why this worker should receive no calls, or None if it should. Called
            for each request, one at a time, on a thread of its own, with the GIL; an exception counts as a reason, too.

    Raises:
        TypeError: an argument of another type.
    """

    address: str | int
    check: Callable[[], str | None] | None = None

    __module__ = "torchrpc.rpc"

    def __post_init__(self) -> None:
        if isinstance(self.address, bool) or not isinstance(self.address, str | int):
            raise TypeError(
                f"address must be a str or a port, but is a {type(self.address).__name__}: {self.address!r}."
            )
        if self.check is not None and not callable(self.check):
            raise TypeError(f"check must be a function, but is a {type(self.check).__name__}: {self.check!r}.")
