"""A profile of all that this process does for others, with torch's legacy profiler."""

import itertools
from typing import Any

from torch.autograd.profiler_legacy import _parse_legacy_records, profile
from torch.autograd.profiler_util import EventList

from torchrpc._C import _disable_server_process_global_profiler, _enable_server_process_global_profiler

__all__: list[str] = []


class _server_process_global_profile(profile):
    """A context manager like `torch.autograd.profiler_legacy.profile`, for the threads that serve calls.

    It may be entered and left by calls: make one on the worker to look at with `rpc.remote`. They nest, and an outer
    one has the inner one's events, too. Afterwards `function_events` holds all events, and
    `process_global_function_events` a list of events for each request served.
    """

    def __enter__(self) -> Any:
        if not self.enabled:
            return None
        if self.entered:  # type: ignore[has-type]
            raise RuntimeError("autograd profiler traces are not reentrant")
        self.entered = True
        _enable_server_process_global_profiler(self.config())
        return self

    def __exit__(self, *_: object) -> Any:
        if not self.enabled:
            return None
        requests = [_parse_legacy_records(threads) for threads in _disable_server_process_global_profiler()]
        for events in requests:
            events.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
        self.process_global_function_events = requests
        self.function_events = EventList(
            itertools.chain.from_iterable(requests),
            use_device="cuda" if self.use_cuda else None,
            profile_memory=self.profile_memory,
        )
        self.function_events._build_tree()
        return False
