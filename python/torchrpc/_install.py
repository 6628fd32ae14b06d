"""Puts torchrpc's modules where torch's own RPC modules are.

Little is loaded for it. `torchrpc.rpc` and `torchrpc.autograd` are shells that load themselves on first use; the first
then calls `on_load`, which hands our classes to those parts of torch that took hold of torch's while torch was
imported. Modules that torch has not imported yet are found to be ours when they are asked for.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

# torch's module -> ours; their submodules follow.
MODULES = {
    "torch.distributed.rpc": "torchrpc.rpc",
    "torch.distributed.autograd": "torchrpc.autograd",
    "torch._C._distributed_autograd": "torchrpc.autograd",
    "torch.distributed.optim.optimizer": "torchrpc.optim",
    "torch.distributed.nn.api.remote_module": "torchrpc.nn.remote_module",
}
# Names that torch's other modules took from the modules above: (module, its attribute, where ours is).
HOLDERS = [
    ("torch._jit_internal", "RRef", "torchrpc.rpc.api:RRef"),
    ("torch._jit_internal", "PyRRef", "torchrpc._C:PyRRef"),
    ("torch.jit.annotations", "RRef", "torchrpc.rpc.api:RRef"),
    ("torch.nn.parallel.distributed", "RRef", "torchrpc.rpc.api:RRef"),
    ("torch.nn.parallel.distributed", "RPC_AVAILABLE", "torchrpc._rref_types:AVAILABLE"),
    ("torch.distributed._shard.sharded_tensor.api", "rpc", "torchrpc.rpc:"),
    ("torch.distributed._shard.sharded_tensor.utils", "rpc", "torchrpc.rpc:"),
    ("torch.distributed.optim", "DistributedOptimizer", "torchrpc.optim:DistributedOptimizer"),
    ("torch.distributed.nn", "RemoteModule", "torchrpc.nn.remote_module:RemoteModule"),
]
# The C++ modules behind torch's; dependants compare types with their classes.
BINDINGS, OUR_BINDINGS = ["torch._C._distributed_rpc", "torch._C._distributed_rpc_testing"], "torchrpc._C"
# What torch's modules look for in torch._C to know whether there is RPC.
MARKS = ["_rpc_init", "_dist_autograd_init"]
# What modules imported without RPC have not, or of another kind.
MISSING = {
    "torch._jit_internal": ["RRef", "PyRRef", "is_rref", "is_rref_instance"],
    "torch.jit.annotations": ["RRef", "RRefType", "is_rref"],
}

_installed = False


def install() -> None:
    """See `torchrpc.install`."""
    global _installed
    import torch.distributed  # may come here again, by way of _autoload

    if _installed:
        return
    if importlib.util.find_spec(OUR_BINDINGS) is None:
        raise RuntimeError(
            "torchrpc was asked to replace torch.distributed.rpc, but its extension torchrpc._C is not built for "
            f"Python {sys.version_info[0]}.{sys.version_info[1]}. Build it (pip install .) or unset TORCHRPC_REPLACE. "
            "`python -m torchrpc doctor` tells more."
        )
    bindings = sys.modules.get(BINDINGS[0])
    if bindings is not None and bindings._is_current_rpc_agent_set():
        raise RuntimeError(
            "torchrpc cannot replace torch.distributed.rpc: torch's own RPC is already initialised in this process. "
            "Call torchrpc.install() before init_rpc, or shut RPC down first."
        )
    if not hasattr(torch._C, "_rpc_init"):
        _fill_in()
    for theirs, ours in MODULES.items():
        for name in [name for name in sys.modules if name.startswith(theirs + ".")]:
            del sys.modules[name]
        if theirs.rpartition(".")[0] in sys.modules:
            _put(theirs, importlib.import_module(ours))
    for name in BINDINGS:
        _put(name, _stand_in(name, OUR_BINDINGS))
    sys.meta_path.insert(0, _AliasFinder())
    _installed = True
    if OUR_BINDINGS in sys.modules:
        on_load()


def fill_gap() -> None:
    """Serve `torch.distributed.rpc` where torch was built without it; never raises."""
    import torch.distributed

    if torch.distributed.is_available() and importlib.util.find_spec(OUR_BINDINGS) is not None:
        install()


def on_load() -> None:
    """Called when `torchrpc.rpc` has loaded: finishes what `install` began."""
    if not _installed:
        return
    for name in BINDINGS:
        _put(name, sys.modules[OUR_BINDINGS])
    _serve_torchscript()
    for holder, attribute, target in HOLDERS:
        module, _, name = target.partition(":")
        if holder in sys.modules:
            ours = importlib.import_module(module)
            if not name or hasattr(ours, name):  # else it is being imported by the holder, which copies it afterwards
                setattr(sys.modules[holder], attribute, getattr(ours, name) if name else ours)


def _fill_in() -> None:
    """Makes a torch without RPC look like one with RPC."""
    import torch

    from . import _rref_types

    for mark in MARKS:
        setattr(torch._C, mark, lambda: True)
    for holder, names in MISSING.items():
        for name in names:
            setattr(sys.modules[holder], name, getattr(_rref_types, name))


def _serve_torchscript() -> None:
    """Calls and backward passes inside TorchScript go through the operators behind these functions."""
    from torch.jit._builtins import _register_builtin

    from torchrpc import autograd

    _register_builtin(autograd.get_gradients, "aten::get_gradients")
    _register_builtin(autograd.backward, "aten::dist_backward")
    sys.modules[OUR_BINDINGS]._serve_torchscript()


def _put(name: str, module: types.ModuleType) -> None:
    """Make `name` mean `module`, for imports and as an attribute of its parent."""
    parent, _, leaf = name.rpartition(".")
    sys.modules[name] = module
    setattr(sys.modules[parent], leaf, module)


def _stand_in(name: str, target: str) -> types.ModuleType:
    """A module that reads its attributes from `target`, which it imports when first asked."""
    module = types.ModuleType(name, f"Stands for {target} until that is loaded.")

    def forward(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        return getattr(importlib.import_module(target), attribute)

    module.__getattr__ = forward  # type: ignore[method-assign]
    return module


class _AliasFinder(importlib.abc.MetaPathFinder):
    """Finds `torch.distributed.rpc.api` to be the very module `torchrpc.rpc.api`."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        for theirs, ours in MODULES.items():
            if fullname == theirs or fullname.startswith(theirs + "."):
                name = ours + fullname[len(theirs) :]
                if importlib.util.find_spec(name) is not None:
                    return importlib.machinery.ModuleSpec(fullname, _AliasLoader(name))
        return None


class _AliasLoader(importlib.abc.Loader):
    def __init__(self, name: str) -> None:
        self.name = name

    def create_module(self, spec: Any) -> types.ModuleType:
        module = importlib.import_module(self.name)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self.spec  # the import system has put the alias's in its place
