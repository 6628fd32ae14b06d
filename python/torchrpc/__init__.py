"""torchrpc: a standalone implementation of `torch.distributed.rpc`, and of the modules that use it, with a C++ core.

Importing this package loads neither torch nor C++; the first use of a module does. Every `import torch` imports this
file (see `_autoload`), so it must load quickly.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import autograd, nn, observe, optim, profiler, rpc
    from ._local_group import RankError, local_group
    from .rpc._calls.batching import batched
    from .rpc._calls.cpp_functions import cpp_function
    from .rpc._calls.futures import Future
    from .rpc._calls.named_objects import lookup, register, unregister
    from .rpc._calls.supervision import supervise
    from .rpc._calls.waiting import wait
    from .rpc._errors import (
        ArgumentMismatchError,
        CancelledError,
        NameNotFoundError,
        NotAllowedError,
        QuotaExceededError,
        RemoteException,
        RendezvousError,
        RpcError,
        RpcTimeoutError,
        SerializationError,
        ShutdownError,
        WorkerLostError,
    )
    from .rpc._group.members import on_member_change
    from .rpc._values.structs import cpp_struct
    from .rpc.api import RRef
    from .rpc.functions import cancelled, restorable

    cmake_prefix_path: str

_MODULES = ["autograd", "nn", "observe", "optim", "profiler", "rpc"]
_ERRORS = [
    "ArgumentMismatchError",
    "CancelledError",
    "NameNotFoundError",
    "NotAllowedError",
    "QuotaExceededError",
    "RemoteException",
    "RendezvousError",
    "RpcError",
    "RpcTimeoutError",
    "SerializationError",
    "ShutdownError",
    "WorkerLostError",
]
_NAMES = {  # name -> the module that has it
    "Future": "torchrpc.rpc._calls.futures",
    "RRef": "torchrpc.rpc.api",
    "RankError": "torchrpc._local_group",
    "batched": "torchrpc.rpc._calls.batching",
    "cancelled": "torchrpc.rpc.functions",
    "cpp_function": "torchrpc.rpc._calls.cpp_functions",
    "cpp_struct": "torchrpc.rpc._values.structs",
    "local_group": "torchrpc._local_group",
    "lookup": "torchrpc.rpc._calls.named_objects",
    "on_member_change": "torchrpc.rpc._group.members",
    "register": "torchrpc.rpc._calls.named_objects",
    "restorable": "torchrpc.rpc.functions",
    "supervise": "torchrpc.rpc._calls.supervision",
    "unregister": "torchrpc.rpc._calls.named_objects",
    "wait": "torchrpc.rpc._calls.waiting",
    **dict.fromkeys(_ERRORS, "torchrpc.rpc._errors"),
}

__all__ = [
    "ArgumentMismatchError",
    "CancelledError",
    "Future",
    "NameNotFoundError",
    "NotAllowedError",
    "QuotaExceededError",
    "RRef",
    "RankError",
    "RemoteException",
    "RendezvousError",
    "RpcError",
    "RpcTimeoutError",
    "SerializationError",
    "ShutdownError",
    "WorkerLostError",
    "__version__",
    "autograd",
    "batched",
    "cancelled",
    "cmake_prefix_path",
    "cpp_function",
    "cpp_struct",
    "install",
    "local_group",
    "lookup",
    "nn",
    "observe",
    "on_member_change",
    "optim",
    "profiler",
    "register",
    "restorable",
    "rpc",
    "supervise",
    "unregister",
    "wait",
]


def install() -> None:
    """Replace `torch.distributed.rpc`, and the modules that use it, by torchrpc in this process.

    It also replaces `torch.distributed.autograd`, `torch.distributed.optim.DistributedOptimizer` and
    `torch.distributed.nn.RemoteModule`. The rest of torch.distributed.optim and .nn stays torch's.

    Call it before the first `init_rpc`, preferably in the first line of a script. Names that a module has already
    copied (`from torch.distributed.rpc import rpc_sync` above this call) stay torch's own in that module. The call does
    not affect processes that are started later: for these, set `TORCHRPC_REPLACE=1` or run
    `python -m torchrpc script.py`.

    The call starts no thread and loads no C++ (the first use of the module does). A second call does nothing. One
    thread at a time may call it.

    Raises:
        RuntimeError: torch's own RPC is initialized already, or torchrpc's extension is missing.
    """
    from ._install import install

    install()


def _installed_torch() -> str:
    """Return the version of the torch in this environment; an empty string if it is missing or has no metadata."""
    if "torch" in sys.modules:
        return getattr(sys.modules["torch"], "__version__", "")
    from importlib import metadata

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _binaries() -> dict[str, str]:
    """Return the folders of the binaries in this package by the minor release of torch that they are built for."""
    parent = os.path.join(__path__[0], "_built")
    names = os.listdir(parent) if os.path.isdir(parent) else []
    releases = sorted(
        (name.removeprefix("torch") for name in names), key=lambda text: [int(x) for x in text.split(".")]
    )
    return {release: os.path.join(parent, f"torch{release}") for release in releases}


def _select_binaries() -> str:
    """Add the binaries for the installed torch to this package's path; return an error text if there are none."""
    version = _installed_torch()
    release = ".".join(version.split(".")[:2])
    folder = os.path.join(__path__[0], "_built", f"torch{release}")
    if not version or folder in __path__:
        return ""
    if os.path.isdir(folder):
        __path__.append(folder)
        return ""
    if not (built := list(_binaries())):
        return ""  # nothing is built yet: the import of the extension says so
    from ._torch_versions import SUPPORTED

    releases = " and ".join(filter(None, [", ".join(built[:-1]), built[-1]]))
    if release in SUPPORTED:
        remedy = "build torchrpc for this one (pip install --no-build-isolation --no-binary=torchrpc --force-reinstall "
        remedy += "--no-deps torchrpc)"
    else:
        remedy = f"another torchrpc: this version supports torch {SUPPORTED[0]} to {SUPPORTED[-1]}"
    return (
        f"This torchrpc is built for torch {releases}, but this environment has torch {version}. Install a torch that "
        f"fits (pip install 'torch=={built[-1]}.*'), or {remedy}."
    )


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"torchrpc.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name == "cmake_prefix_path":  # for find_package(torchrpc): cmake -DCMAKE_PREFIX_PATH=...
        if len(__path__) == 1:
            raise AttributeError("torchrpc.cmake_prefix_path: there are no binaries for the installed torch")
        return __path__[-1]
    if name == "__version__":
        from importlib import metadata

        try:
            return metadata.version("torchrpc")
        except metadata.PackageNotFoundError:  # run from a source tree
            return "0+unknown"
    raise AttributeError(f"module 'torchrpc' has no attribute {name!r}")


_torch_is_loading = getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False)
# During `import torch`, `_autoload` reports the error: an error here would make that import fail.
if not _torch_is_loading and (_why := _select_binaries()):
    raise ImportError(_why)
