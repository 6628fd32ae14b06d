"""RRef types and checks for those modules of torch that were imported while torch had no RPC.

This module loads nothing: before `torchrpc.rpc` is loaded, no RRef exists.
"""

import sys
from typing import Any, get_origin

from torch._C import RRefType

__all__ = ["AVAILABLE", "PyRRef", "RRef", "RRefType", "is_rref", "is_rref_instance"]

AVAILABLE = True
RRef = PyRRef = None  # until torchrpc.rpc is loaded


def is_rref(annotation: Any) -> bool:
    """Return whether a type annotation is `RRef[something]`. Raises RuntimeError for a plain `RRef`."""
    ours = getattr(sys.modules.get("torchrpc.rpc.api"), "RRef", None)
    if ours is not None and annotation is ours:
        raise RuntimeError("TorchScript must know what an RRef refers to: write RRef[int], say, instead of RRef.")
    return ours is not None and get_origin(annotation) is ours


def is_rref_instance(obj: Any) -> bool:
    """Return whether the object is an RRef."""
    ours = getattr(sys.modules.get("torchrpc._C"), "PyRRef", None)
    return ours is not None and isinstance(obj, ours)
