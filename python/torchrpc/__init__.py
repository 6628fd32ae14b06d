"""torchrpc: a standalone implementation of `torch.distributed.rpc`, and of the modules that use it, with a C++ core.

Importing this package loads neither torch nor C++; the first use of a module does. Every `import torch` imports this
file (see `_autoload`), so it must cost nothing.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import autograd, nn, optim, profiler, rpc
    from ._local_group import RankError, local_group
    from .rpc._batching import batched
    from .rpc._cpp_functions import cpp_function
    from .rpc._errors import (
        NameNotFoundError,
        NotAllowedError,
        RendezvousError,
        RpcError,
        RpcTimeoutError,
        SerializationError,
        ShutdownError,
        WorkerLostError,
    )
    from .rpc._futures import Future
    from .rpc._waiting import wait
    from .rpc.api import RRef

    cmake_prefix_path: str

_MODULES = ["autograd", "nn", "optim", "profiler", "rpc"]
_ERRORS = [
    "NameNotFoundError",
    "NotAllowedError",
    "RendezvousError",
    "RpcError",
    "RpcTimeoutError",
    "SerializationError",
    "ShutdownError",
    "WorkerLostError",
]
_NAMES = {  # name -> the module that has it
    "Future": "torchrpc.rpc._futures",
    "RRef": "torchrpc.rpc.api",
    "RankError": "torchrpc._local_group",
    "batched": "torchrpc.rpc._batching",
    "cpp_function": "torchrpc.rpc._cpp_functions",
    "local_group": "torchrpc._local_group",
    "wait": "torchrpc.rpc._waiting",
    **dict.fromkeys(_ERRORS, "torchrpc.rpc._errors"),
}

__all__ = [
    "Future",
    "NameNotFoundError",
    "NotAllowedError",
    "RRef",
    "RankError",
    "RendezvousError",
    "RpcError",
    "RpcTimeoutError",
    "SerializationError",
    "ShutdownError",
    "WorkerLostError",
    "__version__",
    "autograd",
    "batched",
    "cmake_prefix_path",
    "cpp_function",
    "install",
    "local_group",
    "nn",
    "optim",
    "profiler",
    "rpc",
    "wait",
]


def install() -> None:
    """Replace `torch.distributed.rpc`, and the modules that use it, by torchrpc in this process.

    Also replaced: `torch.distributed.autograd`, `torch.distributed.optim.DistributedOptimizer` and
    `torch.distributed.nn.RemoteModule`; the rest of torch.distributed.optim and .nn stays torch's.

    Call it before the first `init_rpc`, best in the first line of a script. Names that a module has already copied
    (`from torch.distributed.rpc import rpc_sync` above this call) stay torch's own in that module. It does not affect
    processes that are started later: set `TORCHRPC_REPLACE=1`, or run `python -m torchrpc script.py`, for those.

    It starts no thread and loads no C++ (the first use of the module does). Calling it again does nothing. One thread
    at a time may call it.

    Raises:
        RuntimeError: torch's own RPC is initialized already, or torchrpc's extension is missing.
    """
    from ._install import install

    install()


def _wrong_torch() -> str:
    """Return an error text if the extension does not work with the torch in this environment; else an empty string."""
    if "torch" in sys.modules:
        found = getattr(sys.modules["torch"], "__version__", "")
    else:
        from importlib import metadata

        try:
            found = metadata.version("torch")
        except metadata.PackageNotFoundError:  # torch is missing, which its import reports, or has no metadata
            return ""
    built, release = _built_for(), ".".join(found.split(".")[:2])
    if not found or not built or release == built:
        return ""
    from ._torch_versions import SUPPORTED

    if release in SUPPORTED:
        remedy = "build torchrpc again for this one (pip install --no-build-isolation --force-reinstall torchrpc)"
    else:
        remedy = f"another torchrpc: this one supports torch {SUPPORTED[0]} to {SUPPORTED[-1]}"
    return (
        f"This torchrpc is built for torch {built}, but this environment has torch {found}. Install the one that fits "
        f"(pip install 'torch=={built}.*'), or {remedy}."
    )


def _built_for() -> str:
    """Return the release of torch that the extension is built for; empty if it is not built."""
    try:
        return importlib.import_module("torchrpc._built").TORCH
    except ImportError:
        return ""


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"torchrpc.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name == "cmake_prefix_path":  # for find_package(torchrpc): cmake -DCMAKE_PREFIX_PATH=...
        return __path__[0]
    if name == "__version__":
        from importlib import metadata

        try:
            return metadata.version("torchrpc")
        except metadata.PackageNotFoundError:  # run from a source tree
            return "0+unknown"
    raise AttributeError(f"module 'torchrpc' has no attribute {name!r}")


_torch_is_loading = getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False)
# During `import torch`, `_autoload` reports the error: an error here would make that import fail.
if not _torch_is_loading and (_why := _wrong_torch()):
    raise ImportError(_why)
