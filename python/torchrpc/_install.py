"""Replaces torch's own RPC modules by torchrpc's.

The replacement itself loads little. `torchrpc.rpc` and `torchrpc.autograd` are lazy: the first use loads the
extension, and then `torchrpc.rpc` calls `on_load`, which replaces the classes that other modules of torch copied while
torch was imported. For modules that torch has not imported yet, an import hook returns torchrpc's modules.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

# torch's module -> torchrpc's; submodules likewise.
MODULES = {
    "torch.distributed.rpc": "torchrpc.rpc",
    "torch.distributed.autograd": "torchrpc.autograd",
    "torch._C._distributed_autograd": "torchrpc.autograd",
    "torch.distributed.optim.optimizer": "torchrpc.optim",
    "torch.distributed.nn.api.remote_module": "torchrpc.nn.remote_module",
}
# Copies that other modules of torch have: (module, its attribute, torchrpc's "module:name").
COPIES = [
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
# torch's C++ modules, which are replaced because scripts compare types with their classes; and torchrpc's extension.
BINDINGS, OUR_BINDINGS = ["torch._C._distributed_rpc", "torch._C._distributed_rpc_testing"], "torchrpc._C"
# Attributes of torch._C from which torch's modules conclude that torch has RPC.
MARKERS = ["_rpc_init", "_dist_autograd_init"]
# Names that these modules lack, or define differently, if torch was built without RPC.
MISSING = {
    "torch._jit_internal": ["RRef", "PyRRef", "is_rref", "is_rref_instance"],
    "torch.jit.annotations": ["RRef", "RRefType", "is_rref"],
}

_installed = False


def install() -> None:
    """See `torchrpc.install`."""
    global _installed
    import torch.distributed  # may call this function again, through _autoload

    if _installed:
        return
    if importlib.util.find_spec(OUR_BINDINGS) is None:
        raise RuntimeError(
            "torchrpc was asked to replace torch.distributed.rpc, but its extension torchrpc._C is not built for "
            f"Python {sys.version_info[0]}.{sys.version_info[1]}. Build it (pip install .) or unset TORCHRPC_REPLACE. "
            "`python -m torchrpc doctor` reports more."
        )
    bindings = sys.modules.get(BINDINGS[0])
    if bindings is not None and bindings._is_current_rpc_agent_set():
        raise RuntimeError(
            "torchrpc cannot replace torch.distributed.rpc: torch's own RPC is already initialised in this process. "
            "Call torchrpc.install() before init_rpc, or shut RPC down first."
        )
    if not hasattr(torch._C, "_rpc_init"):
        _add_missing_names()
    for theirs, ours in MODULES.items():
        for name in [name for name in sys.modules if name.startswith(theirs + ".")]:
            del sys.modules[name]
        if theirs.rpartition(".")[0] in sys.modules:
            _replace_module(theirs, importlib.import_module(ours))
    for name in BINDINGS:
        _replace_module(name, _forwarding_module(name, OUR_BINDINGS))
    sys.meta_path.insert(0, _AliasFinder())
    _installed = True
    if OUR_BINDINGS in sys.modules:
        on_load()


def fill_gap() -> None:
    """Install in a torch that was built without RPC, if the extension exists; otherwise do nothing. Never raises."""
    import torch.distributed

    if torch.distributed.is_available() and importlib.util.find_spec(OUR_BINDINGS) is not None:
        install()


def on_load() -> None:
    """Replace the C++ modules and the copies of names. `torchrpc.rpc` calls it at the end of its import."""
    if not _installed:
        return
    for name in BINDINGS:
        _replace_module(name, sys.modules[OUR_BINDINGS])
    for name, value in vars(importlib.import_module("torchrpc.rpc._absent")).items():
        if name.startswith("_invoke_"):
            setattr(sys.modules[OUR_BINDINGS], name, value)  # torch has these names in its C++ module, too
    _serve_torchscript()
    for holder, attribute, target in COPIES:
        module, _, name = target.partition(":")
        if holder in sys.modules:
            ours = importlib.import_module(module)
            if not name or hasattr(ours, name):  # else the holder is still importing it, and copies the name then
                setattr(sys.modules[holder], attribute, getattr(ours, name) if name else ours)


def _add_missing_names() -> None:
    """Add the names that only a torch with RPC has to a torch that was built without RPC."""
    import torch

    from . import _rref_types

    for marker in MARKERS:
        setattr(torch._C, marker, lambda: True)
    for holder, names in MISSING.items():
        for name in names:
            setattr(sys.modules[holder], name, getattr(_rref_types, name))


def _serve_torchscript() -> None:
    """Register the operators for calls and backward passes inside TorchScript."""
    from torch.jit._builtins import _register_builtin

    from torchrpc import autograd

    _register_builtin(autograd.get_gradients, "aten::get_gradients")
    _register_builtin(autograd.backward, "aten::dist_backward")
    sys.modules[OUR_BINDINGS]._serve_torchscript()


def _replace_module(name: str, module: types.ModuleType) -> None:
    """Make `name` refer to `module`, for imports and as an attribute of its parent."""
    parent, _, leaf = name.rpartition(".")
    sys.modules[name] = module
    setattr(sys.modules[parent], leaf, module)


def _forwarding_module(name: str, target: str) -> types.ModuleType:
    """Return a module that reads its attributes from `target` and imports `target` at the first access."""
    module = types.ModuleType(name, f"Forwards to {target}.")

    def forward(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        return getattr(importlib.import_module(target), attribute)

    module.__getattr__ = forward  # type: ignore[method-assign]
    return module


class _AliasFinder(importlib.abc.MetaPathFinder):
    """An import hook: `torch.distributed.rpc.api` is the same module object as `torchrpc.rpc.api`."""

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
        module.__spec__ = self.spec  # the import system has set the alias's spec
