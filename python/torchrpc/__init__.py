"""torchrpc: `torch.distributed.rpc` and what is built on it, rebuilt outside torch, on a C++ core of its own.

Importing this package loads neither torch nor C++: its parts do, on first use. `import torch` itself comes here
(see `_autoload`), so this file must stay free.
"""

import importlib
import sys
from typing import Any

_TORCH = "2.13"  # what the extension is built for; pyproject.toml says it to pip

_PARTS = ["autograd", "nn", "optim", "profiler", "rpc"]
_FUNCTIONS = {  # name -> where it is
    "batched": "torchrpc.rpc._batching",
    "cpp_function": "torchrpc.rpc._cpp_functions",
    "wait": "torchrpc.rpc._waiting",
    "WorkerLostError": "torchrpc.rpc._exceptions",
}

__all__ = [
    "WorkerLostError",
    "__version__",
    "autograd",
    "batched",
    "cmake_prefix_path",
    "cpp_function",
    "install",
    "nn",
    "optim",
    "profiler",
    "rpc",
    "wait",
]


def install() -> None:
    """Make `torch.distributed.rpc`, and all that is built on it, mean torchrpc in this process.

    Also replaced: `torch.distributed.autograd`, `torch.distributed.optim.DistributedOptimizer` and
    `torch.distributed.nn.RemoteModule`; the rest of torch.distributed.optim and .nn stays torch's.

    Call it before the first `init_rpc`, best as the first line of a script. Names that a module has already copied
    (`from torch.distributed.rpc import rpc_sync` above this call) stay torch's own in that module. Processes started
    later are not affected: set `TORCHRPC_REPLACE=1`, or run `python -m torchrpc script.py`, for those.

    It starts no thread and loads no C++ (the first use of the module does). Calling it again does nothing.

    Raises:
        RuntimeError: torch's own RPC is initialised already, or torchrpc's extension is not there.
    """
    from ._install import install

    install()


def _wrong_torch() -> str:
    """What to tell if the torch in this environment is not one that the extension works with; else an empty text."""
    if "torch" in sys.modules:
        found = getattr(sys.modules["torch"], "__version__", "")
    else:
        from importlib import metadata

        try:
            found = metadata.version("torch")
        except metadata.PackageNotFoundError:  # importing torch will tell, or it is there without metadata
            return ""
    if not found or ".".join(found.split(".")[:2]) == _TORCH:
        return ""
    return (
        f"This torchrpc works with torch {_TORCH}, but this environment has torch {found}. Install the one that fits "
        f"(pip install torch=={_TORCH}.0), or a torchrpc that is made for torch {found}."
    )


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return importlib.import_module(f"torchrpc.{name}")
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(_FUNCTIONS[name]), name)
    if name == "cmake_prefix_path":  # for find_package(torchrpc): cmake -DCMAKE_PREFIX_PATH=...
        return __path__[0]
    if name == "__version__":
        from importlib import metadata

        try:
            return metadata.version("torchrpc")
        except metadata.PackageNotFoundError:  # run from a source tree
            return "0+unknown"
    raise AttributeError(f"module 'torchrpc' has no attribute {name!r}")


# While torch is being imported, that is for `_autoload` to say: an error here would keep torch from being imported.
if not getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False) and (why := _wrong_torch()):
    raise ImportError(why)
