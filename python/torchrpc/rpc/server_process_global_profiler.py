"""A profile of all calls that this process serves, by torch's legacy profiler."""

import itertools
from typing import Any

from torch.autograd.profiler_legacy import _parse_legacy_records, profile
from torch.autograd.profiler_util import EventList

from torchrpc._C import _disable_server_process_global_profiler, _enable_server_process_global_profiler

__all__: list[str] = []


class _server_process_global_profile(profile):
    """A context manager like `torch.autograd.profiler_legacy.profile`, for the threads that serve calls.

    Other workers may enter and leave it by calls: create one with `rpc.remote` on the worker to be profiled. Profiles
    may be nested; an outer one also has the events of the inner one. After the block, `function_events` has all
    events, and `process_global_function_events` a list of events for each served request.
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
