"""The API of `torch.distributed.autograd`: backward passes through calls, over all the workers that took part.

This file is a shell, as `torchrpc.rpc` is: the extension is loaded when something here is first used, so that putting
it in torch's place costs nothing in a process without RPC. All functions may be called from any thread.

Example:
    >>> weight = torch.ones(2, requires_grad=True)
    >>> with dist_autograd.context() as context_id:
    ...     loss = rpc.rpc_sync("worker1", torch.mul, args=(weight, 3)).sum()
    ...     dist_autograd.backward(context_id, [loss])
    ...     gradient = dist_autograd.get_gradients(context_id)[weight]
    >>> gradient
    tensor([3., 3.])
"""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

__all__ = [
    "DistAutogradContext",
    "backward",
    "context",
    "get_default_mode",
    "get_gradients",
    "is_available",
    "set_default_mode",
]

_FROM_CORE = (
    "DistAutogradContext _current_context _get_debug_info _get_max_id _is_valid_context _new_context _release_context "
    "_retrieve_context"
)

MODES = ("fast", "smart")
_MODE_VARIABLE = "TORCHRPC_BACKWARD_MODE"
_default_mode: str | None = None  # what set_default_mode() has said


def is_available() -> bool:
    """Whether there is distributed autograd here; always true."""
    return True


def _core() -> Any:
    return importlib.import_module("torchrpc._C")


class context:
    """A block of which all calls are recorded, so that a backward pass can go through them.

    Entering gives the context's id, an int that is unique in the group; it stands for the context on every worker.
    The calls that this thread makes in the block are recorded if tensors that require gradients go with them or come
    back, and so are the calls that those make in turn. Gradients add up in the context, not in `.grad`, so that passes
    of several trainers through one model do not mix. Leaving releases the context, with its graph and gradients, on
    all workers.

    Raises:
        RuntimeError: on entering, if the thread is in a context already, or RPC is not initialized.

    Threads may be in different contexts at the same time; an object is for one thread and one block.
    """

    def __enter__(self) -> int:
        self.autograd_context = _core()._new_context()
        return self.autograd_context._context_id()

    def __exit__(self, *exc_info: object) -> None:
        _core()._release_context(self.autograd_context._context_id())


def backward(
    context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False, *, mode: str | None = None
) -> None:
    """Compute the gradients of `roots` on all workers that they depend on, and wait until all of them are there.

    They are added to those that the context has already; `get_gradients` and DistributedOptimizer find them there, on
    the worker of each leaf, each with the shape, dtype and device of its leaf. `.grad` does not change. Hooks run on
    the worker of the tensor that they belong to. Any thread may call, several at a time in different contexts.

    Args:
        context_id (int): what `context()` gave.
        roots (list of Tensor): tensors with one element each, computed on this worker in that context.
        retain_graph (bool): keep the graph, so that another pass through it can follow.
        mode (str): how workers find out which gradients they have to wait for; None: `get_default_mode()`.

            "smart": only recorded calls that the roots depend on take part. Which these are is known from the replies,
            or found out first, by asking along the calls. Results that the loss does not use cost nothing and keep
            nobody waiting.

            "fast": every recorded call is taken to be part of the pass, so nobody needs to be asked. As in torch, it
            waits for gradients that never come if the loss does not use the result of a recorded call; it gives up
            when nothing has moved for `rpc_timeout` seconds.

    Raises:
        RuntimeError: no such context; no roots, or roots without a graph or with more than one element; a worker was
            lost. Also for what a function or hook raised on this worker or another one: the text names the worker.
        TypeError: arguments of the wrong type.
        ValueError: no such mode.
    """
    _core().backward(context_id, roots, retain_graph, get_default_mode() if mode is None else _checked(mode, "mode"))


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients that backward passes have left in a context on this worker: {leaf tensor: gradient}.

    They have the shapes and dtypes of their leaves, and are the context's own tensors, not copies: a later pass through
    the same context changes them. Any thread may call.

    Raises:
        RuntimeError: there is no context of that id here.
    """
    return _core().get_gradients(context_id)


def set_default_mode(mode: str | None) -> None:
    """Choose the mode of backward passes that are started in this process without one: "fast" or "smart".

    None: back to what holds without this call (see `get_default_mode`).

    Raises:
        ValueError: no such mode.
    """
    global _default_mode
    _default_mode = None if mode is None else _checked(mode, "mode")


def get_default_mode() -> str:
    """The mode of passes that are started in this process without one.

    In this order: what `set_default_mode` said; the environment variable TORCHRPC_BACKWARD_MODE; "fast" where torchrpc
    has taken the place of torch.distributed.*, whose passes wait in the same way; else "smart".

    Raises:
        ValueError: the variable names no mode.
    """
    if _default_mode is not None:
        return _default_mode
    if asked := os.environ.get(_MODE_VARIABLE, "").strip():
        return _checked(asked.lower(), _MODE_VARIABLE)
    return "fast" if sys.modules.get("torch.distributed.autograd") is sys.modules[__name__] else "smart"


def _checked(mode: str, name: str) -> str:
    if mode not in MODES:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, MODES))}, but is {mode!r}.")
    return mode


def _init(worker_id: int) -> None:
    """Called by `init_rpc` before the worker joins; contexts are ready as soon as the worker is."""


def __getattr__(name: str) -> Any:
    if name in _FROM_CORE.split():
        return getattr(_core(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_FROM_CORE.split()})
