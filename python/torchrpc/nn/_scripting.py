"""The module that `torch.jit.script` compiles instead of a RemoteModule.

TorchScript's own RPC operators belong to torch's RPC. So the compiled methods call into Python: one function starts the
call, and another waits for it, inside `torch.jit.fork` if the script wants a future. Both functions have the types of
the interface, so their source is generated for each interface. Any thread may call the functions.
"""

import functools
import itertools
import linecache
import typing
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_SOURCE = """
@torch.jit.ignore
def start(key: int, {typed}) -> int:
    return _start(key, ({names},))

@torch.jit.ignore
def finish(call: int) -> {result}:
    return _finish(call)

class ScriptedRemoteModule(nn.Module):
    __jit_ignored_attributes__ = ["remote_forward"]

    def __init__(self, key: int, remote_forward):
        super().__init__()
        self.key = key
        self.remote_forward = remote_forward  # the compiled object keeps it alive

    def forward(self, {typed}) -> {result}:
        return finish(start(self.key, {names}))

    @torch.jit.export
    def wait(self, call: int) -> {result}:
        return finish(call)

    @torch.jit.export
    def forward_async(self, {typed}) -> Future[{result}]:
        return torch.jit.fork(self.wait, start(self.key, {names}))

    @torch.jit.export
    def __getstate__(self) -> None:
        raise RuntimeError({refusal!r})

    @torch.jit.export
    def __setstate__(self, state: None) -> None:
        raise RuntimeError({refusal!r})
"""
_REFUSAL = (
    "Passing a script RemoteModule over RPC is not supported. Send its module_rref and call "
    "RemoteModule.init_from_module_rref there. A RemoteModule that is not compiled can only be pickled when using RPC."
)

_numbers = itertools.count()
_forwards: weakref.WeakValueDictionary[int, Callable[..., torch.futures.Future]] = weakref.WeakValueDictionary()
_outstanding: dict[int, torch.futures.Future] = {}  # the calls that no thread has waited for yet


def _start(key: int, args: tuple) -> int:
    call = next(_numbers)
    _outstanding[call] = _forwards[key](*args)
    return call


def _finish(call: int) -> Any:
    return _outstanding.pop(call).wait()


def check_interface(interface: Any) -> Any:
    """Return the schema of the interface's forward.

    Raises:
        AssertionError: it is not a `torch.jit.interface`, or has no `forward`.
    """
    if not getattr(interface, "__torch_script_interface__", False):
        raise AssertionError("Expect a TorchScript class interface decorated by @torch.jit.interface.")
    name = torch._jit_internal._qualified_name(interface)
    compiled = torch.jit._state._python_cu.get_interface(name)
    if "forward" not in (methods := compiled.getMethodNames()):
        raise AssertionError(f"Expect forward in interface methods, while it has {methods}")
    return compiled.getMethod("forward")


@functools.cache
def _class_for(interface: Any) -> Any:
    schema = check_interface(interface)
    arguments = schema.arguments[1:]  # without self
    source = _SOURCE.format(
        typed=", ".join(f"{argument.name}: {argument.type.annotation_str}" for argument in arguments),
        names=", ".join(argument.name for argument in arguments),
        result=schema.returns[0].type.annotation_str,
        refusal=_REFUSAL,
    )
    file = f"<RemoteModule of {torch._jit_internal._qualified_name(interface)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # torch.jit reads it here
    namespace = {**vars(typing), "torch": torch, "nn": nn, "Tensor": torch.Tensor, "Future": torch.jit.Future}
    namespace |= {"_start": _start, "_finish": _finish, "__name__": __name__}
    exec(compile(source, file, "exec"), namespace)
    return namespace["ScriptedRemoteModule"]


def compilable(interface: Any, forward_async: Callable[..., torch.futures.Future]) -> nn.Module:
    """Return a module for torch.jit.script. Its methods have the types of `interface`, and call `forward_async`."""
    key = next(_numbers)
    _forwards[key] = forward_async
    return _class_for(interface)(key, forward_async)
