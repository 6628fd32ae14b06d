"""Helpers of upstream's module, for programs that make distributed optimizers of their own.

DistributedOptimizer itself uses `_parts`.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch


class _LocalOptimizer:
    """An optimizer of parameters of this worker. Any thread may call `step`; the steps run one at a time."""

    global_lock = threading.Lock()  # of all of the process: they may have the same parameters

    def __init__(self, optim_cls: Callable[..., Any], local_params_rref: Iterable[Any], *args: Any, **kwargs: Any):
        self._local_params = [rref.local_value() for rref in local_params_rref]
        self.optim = optim_cls(self._local_params, *args, **kwargs)

    def step(self, autograd_ctx_id: int) -> None:
        """Step with the gradients that this worker has in the context."""
        import torchrpc.autograd as dist_autograd

        gradients = dist_autograd.get_gradients(autograd_ctx_id)
        with self.global_lock:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            self.optim.step()


def _new_local_optimizer(optim_cls: Any, local_params_rref: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
    """Make a `_LocalOptimizer` and return an RRef to it. Runs on the owner of the parameters."""
    import torchrpc.rpc as rpc

    return rpc.RRef(_LocalOptimizer(optim_cls, local_params_rref, *args, **kwargs))


def _local_optimizer_step(local_optim_rref: Any, autograd_ctx_id: int) -> None:
    """Step the `_LocalOptimizer` of the RRef. Runs on its owner."""
    local_optim_rref.local_value().step(autograd_ctx_id)


def _wait_for_all(rpc_futs: Iterable[torch.futures.Future]) -> list[Any]:
    """Wait for all futures; return their results, or raise the last error."""
    results, error = [], None
    for future in rpc_futs:
        try:
            results.append(future.wait())
        except Exception as exc:
            error = exc
    if error is not None:
        raise error
    return results
