"""Inspect running groups: their waits, threads and RRefs. Also counters of calls, Prometheus and traces.

This module is lazy: nothing is loaded until one of its names is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._attach import Group, Member, attach
    from ._health import health_address
    from ._metrics import FunctionMetrics, enable_metrics, functions
    from ._prometheus import MetricsServer, serve_metrics
    from ._tracing import trace

_NAMES = {  # name -> the module that has it
    "FunctionMetrics": "torchrpc.observe._metrics",
    "Group": "torchrpc.observe._attach",
    "Member": "torchrpc.observe._attach",
    "MetricsServer": "torchrpc.observe._prometheus",
    "attach": "torchrpc.observe._attach",
    "enable_metrics": "torchrpc.observe._metrics",
    "functions": "torchrpc.observe._metrics",
    "health_address": "torchrpc.observe._health",
    "serve_metrics": "torchrpc.observe._prometheus",
    "trace": "torchrpc.observe._tracing",
}

__all__ = [
    "FunctionMetrics",
    "Group",
    "Member",
    "MetricsServer",
    "attach",
    "enable_metrics",
    "functions",
    "health_address",
    "serve_metrics",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_NAMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
