"""The API of `torch.distributed.autograd`: backward passes through calls, over all workers that took part.

This module is lazy, as `torchrpc.rpc` is: the first use of a name loads the extension, so that replacing torch's module
costs nothing in a process without RPC. Any thread may call the functions.

Example:
    >>> weight = torch.ones(2, requires_grad=True)
    >>> with dist_autograd.context() as context_id:
    ...     loss = rpc.rpc_sync("worker1", torch.mul, args=(weight, 3)).sum()
    ...     dist_autograd.backward(context_id, [loss])
    ...     gradient = dist_autograd.get_gradients(context_id)[weight]
    >>> gradient
    tensor([3., 3.])
"""

import functools
import importlib
import numbers
import os
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

_EXTENSION_NAMES = (
    "DistAutogradContext _current_context _get_debug_info _get_max_id _is_valid_context _new_context _release_context "
    "_retrieve_context"
)

MODES = ("fast", "smart")
_MODE_VARIABLE = "TORCHRPC_BACKWARD_MODE"
# Runs a backward pass inside a span: (backward, context_id, …). Set by torchrpc.observe.
_in_span: Any = None
_default_mode: str | None = None  # set by set_default_mode()


def is_available() -> bool:
    """Return whether this build has distributed autograd; always True."""
    return True


@functools.cache
def _extension() -> Any:
    return importlib.import_module("torchrpc._C")


class context:
    """A block whose calls are recorded, so that a backward pass can go through them.

    Entering returns the context's id, an int that is unique in the group and identifies the context on every worker.
    The calls that this thread makes in the block are recorded if their arguments or results contain tensors that
    require gradients. Calls that the called functions make in turn are recorded, too. Gradients accumulate in the
    context, not in `.grad`, so passes of several trainers through one model do not mix. The end of the block releases
    the context, with its graph and gradients, on all workers.

    Raises:
        RuntimeError: on entering, if the thread is in a context already, or RPC is not initialized.

    Threads may be in different contexts at the same time. Use an object in one thread and for one block.
    """

    def __enter__(self) -> int:
        self.autograd_context = _extension()._new_context()
        return self.autograd_context._context_id()

    def __exit__(self, *exc_info: object) -> None:
        self.autograd_context._release()


def backward(
    context_id: int,
    roots: Sequence[torch.Tensor] | torch.Tensor,
    retain_graph: bool = False,
    *,
    mode: str | None = None,
) -> None:
    """Compute the gradients of `roots` on all workers that they depend on, and block until all are computed.

    The new gradients are added to those that the context already has. `get_gradients` and DistributedOptimizer read
    them from the context, on the worker of each leaf; each gradient has the shape, dtype and device of its leaf.
    `.grad` does not change. Hooks run on the worker of their tensor. Any thread may call this function, several threads
    at a time in different contexts.

    Args:
        context_id (int): the id that `context()` returned.
        roots (list of Tensor, or Tensor): tensors with one element each, computed on this worker in that context.
        retain_graph (bool): keep the graph, so that another pass through it can follow.
        mode (str): how workers find out which gradients they must wait for; None: `get_default_mode()`.

            "smart": only recorded calls that the roots depend on take part. The workers learn these from the replies,
            or from messages that they exchange along the calls first. Backward does not hang on unused remote results.

            "fast": every recorded call takes part, so no such messages are needed. As in torch, the pass waits for
            gradients that never arrive if the loss does not use the result of a recorded call. Unlike in torch, it
            fails when it has made no progress for `rpc_timeout` seconds.

    Raises:
        RuntimeError: no such context; no roots, or roots without a graph or with more than one element; a worker was
            lost; a function or hook raised an error on any worker: the text names the worker.
        TypeError: arguments of the wrong type.
        ValueError: no such mode.
    """
    if isinstance(roots, torch.Tensor):
        roots = [roots]
    mode = get_default_mode() if mode is None else _checked(mode, "mode")
    run = _extension().backward if _in_span is None else functools.partial(_in_span, _extension().backward)
    try:
        run(context_id, roots, retain_graph, mode)
    except TypeError:
        _check_backward(context_id, roots)
        raise


def _check_backward(context_id: Any, roots: Any) -> None:
    """Raise TypeError for arguments of `backward` of the wrong types."""
    if not isinstance(context_id, numbers.Integral):
        what = f"context_id must be the int that context() returned, but is a {type(context_id).__name__}"
    elif not isinstance(roots, Sequence):
        what = f"roots must be a list of tensors, but is a {type(roots).__name__}"
    elif wrong := [type(root).__name__ for root in roots if not isinstance(root, torch.Tensor)]:
        what = f"roots must be a list of tensors, but has a {wrong[0]}"
    else:
        return
    raise TypeError(f"backward(): incompatible function arguments: {what}. Write backward(context_id, [loss]).")


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients that backward passes have computed in a context on this worker: {leaf tensor: gradient}.

    The gradients have the shapes, dtypes and devices of their leaves. They are the context's own tensors, not copies: a
    later pass through the same context changes them. Any thread may call it.

    Raises:
        RuntimeError: this worker has no context with that id.
    """
    return _extension().get_gradients(context_id)


def set_default_mode(mode: str | None) -> None:
    """Set the mode of backward passes that this process starts without a mode argument: "fast" or "smart".

    None undoes earlier calls (see `get_default_mode`). Any thread may call it.

    Raises:
        ValueError: no such mode.
    """
    global _default_mode
    _default_mode = None if mode is None else _checked(mode, "mode")


def get_default_mode() -> str:
    """Return the mode of backward passes that this process starts without a mode argument.

    It is the mode given to `set_default_mode`, else that of the environment variable TORCHRPC_BACKWARD_MODE, else
    "smart". Any thread may call it.

    Raises:
        ValueError: the variable names no mode.
    """
    if _default_mode is not None:
        return _default_mode
    if mode := os.environ.get(_MODE_VARIABLE, "").strip():
        return _checked(mode.lower(), _MODE_VARIABLE)
    return "smart"


def _checked(mode: str, name: str) -> str:
    if mode not in MODES:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, MODES))}, but is {mode!r}.")
    return mode


def _init(worker_id: int) -> None:
    """Do nothing. `init_rpc` calls this function of upstream's API before the worker joins; scripts may replace it."""


def __getattr__(name: str) -> Any:
    if name in _EXTENSION_NAMES.split():
        return getattr(_extension(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXTENSION_NAMES.split()})
