"""DistributedOptimizer, the object in the script. `_parts` has the optimizers on the owners of the parameters."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch

from ._parts import CPP, CppParts, PythonParts

# Options that are not sent to the core: they do not change its results, or they select the optimizer in Python.
_OPTIONS_OUTSIDE_CORE = ("foreach", "differentiable", "capturable")


class DistributedOptimizer(torch.optim.Optimizer):
    """Steps parameters on the workers that own them, each by its gradient in a context of distributed autograd.

    For SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax and Rprop of torch.optim the owners step in C++, without
    Python. For any other class, also a subclass of these, the owners construct and step an optimizer in Python. A
    DistributedOptimizer is a torch.optim.Optimizer as far as `torch.optim.lr_scheduler` requires: schedulers change
    `param_groups` of this object, and the next step sends the change to the owners.

    A lock on each worker serializes the steps of all optimizers, because trainers may share parameters. Workers are not
    synchronized with each other, and a trainer may step between the forward and backward passes of another. If the
    graph has saved a parameter that was changed in between, that backward pass fails ("modified by an inplace
    operation").

    Args:
        optimizer_class (type): a subclass of torch.optim.Optimizer that all owners can import.
        params_rref (iterable): RRefs to leaf tensors, or parameter groups: dicts with a list of such RRefs as "params"
            and the options of the group.
        args, kwargs: arguments of `optimizer_class` after the parameters.
        lock_free (bool): steps do not wait for the steps of other trainers, and do not invalidate graphs under way. So
            several trainers may share parameters and train at the same time (Niu et al. 2011, Hogwild!: A Lock-Free
            Approach to Parallelizing Stochastic Gradient Descent, arXiv:1106.5730). The cost: a backward pass uses the
            newer values of parameters that have changed since its forward pass, so its gradients are partly stale; and
            one of two concurrent updates of an element may be lost. Both matter little if updates are small or sparse.
            Each optimizer has its own state (momentum, for example), and its own steps do wait for each other.

    Raises:
        ValueError: there are no parameters; a tensor is not a leaf; the class refuses an option.
        TypeError: `params_rref` contains something else than RRefs, or an RRef to something else than a tensor.
        RuntimeError: the same errors from an owner that steps in C++; RPC is not initialized; a worker is lost.

    Any thread may call its methods. `remote_optimizers` is a list of RRefs to the optimizers, one on each owner; these
    RRefs keep the optimizers alive.

    Example:
        >>> weight = rpc.remote("worker1", torch.nn.Parameter, args=(torch.ones(2),))
        >>> optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.5)
        >>> with dist_autograd.context() as context_id:
        ...     loss = weight.to_here().sum()
        ...     dist_autograd.backward(context_id, [loss])
        ...     optimizer.step(context_id)
        >>> weight.to_here().tolist()
        [0.5, 0.5]
    """

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        params_rref: Iterable[Any],
        *args: Any,
        lock_free: bool = False,
        **kwargs: Any,
    ) -> None:
        user_groups = _checked_groups(params_rref)
        # The class itself completes the options, or raises an error for a wrong one.
        local = _placeholder(optimizer_class, user_groups, args, kwargs) if optimizer_class in CPP else None
        self.is_functional_optim = local is not None and not any(
            group.get("differentiable") or group.get("capturable") for group in local.param_groups
        )
        self._parts: CppParts | PythonParts
        if local is not None and self.is_functional_optim:
            groups, defaults = local.param_groups, local.defaults
            self._core_options: frozenset[str] | None = frozenset(defaults) - frozenset(_OPTIONS_OUTSIDE_CORE)
            rrefs = [group["params"] for group in user_groups]
            options = [self._options_of(group) for group in groups]
            self._parts = CppParts(CPP[optimizer_class], rrefs, options, lock_free)
        else:
            self._core_options = None
            self._parts = PythonParts(optimizer_class, user_groups, args, kwargs, lock_free)
            groups, defaults = self._parts.groups, self._parts.defaults
        self._sealed = False
        super().__init__(
            [{**group, "params": own["params"]} for group, own in zip(groups, user_groups, strict=True)], defaults
        )
        self._sealed = True
        self.remote_optimizers = self._parts.remote_optimizers

    def step(self, context_id: int) -> None:
        """Step all parameters that have a gradient in this context, on all owners at once; block until that is done.

        Args:
            context_id (int): the id of a context of distributed autograd that this worker knows.

        Raises:
            RuntimeError: there is no such context; a worker is lost.
            Exception: the error of an optimizer on its owner; the other owners have stepped.
        """
        self._parts.step(context_id, self._options())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, fetched from their owners, and the options, in the form of `torch.optim`.

        Parameters are numbered in the order of the constructor's argument, independent of their owners. So a local
        optimizer of the same class can load the result, and so can a DistributedOptimizer whose parameters have other
        owners. `torch.save` can save the result.

        Raises:
            RuntimeError: a worker is lost.
        """
        self.state.update(enumerate_states(self._parts.state()))
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Send the owners a state that `state_dict` of this, or of a local optimizer of the same class, has returned.

        The options change here at once, and on the owners with the next step at the latest.

        Raises:
            ValueError: the groups differ from this optimizer's in number or size.
            RuntimeError: a state does not fit its parameter; a worker is lost.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            raise ValueError("loaded state dict has a different number of parameter groups")
        if any(
            len(theirs["params"]) != len(ours["params"]) for theirs, ours in zip(saved, self.param_groups, strict=True)
        ):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
            )
        states = state_dict["state"]
        numbers = chain.from_iterable(group["params"] for group in saved)
        options = [{key: value for key, value in group.items() if key != "params"} for group in saved]
        self._parts.load([states.get(number, {}) for number in numbers], options)
        for group, loaded in zip(self.param_groups, options, strict=True):
            group.update(loaded)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError: not supported after construction. Pass all groups to the constructor, as a list of dicts.

        Raises:
            RuntimeError: always.
        """
        if self._sealed:
            raise RuntimeError("DistributedOptimizer takes all groups of parameters at once, when it is constructed.")
        self.param_groups.append(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: gradients belong to the autograd context, which releases them."""

    def _options_of(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group's options for the owners. One-element tensors become numbers, so in-place changes are seen."""
        wanted = group.keys() - {"params"} if self._core_options is None else group.keys() & self._core_options
        return {
            key: value.item() if isinstance(value := group[key], torch.Tensor) and value.numel() == 1 else value
            for key in wanted
        }

    def _options(self) -> list[dict[str, Any]]:
        return [self._options_of(group) for group in self.param_groups]


def enumerate_states(states: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number of the parameter, state) for the states that are not empty."""
    return ((number, state) for number, state in enumerate(states) if state)


def _checked_groups(params_rref: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the groups as dicts with a list of RRefs as "params". Raises ValueError or TypeError if they are wrong."""
    from torchrpc._C import PyRRef

    if isinstance(params_rref, (PyRRef, torch.Tensor, dict)):
        raise TypeError(f"params_rref must be a list of RRefs or of dicts, but is a {type(params_rref).__name__}.")
    items = list(params_rref)
    if not items:
        raise ValueError("optimizer got an empty parameter list")
    groups = [dict(item) for item in items] if isinstance(items[0], dict) else [{"params": items}]
    for number, group in enumerate(groups):
        if "params" not in group:
            raise ValueError(f"group {number} of params_rref has no 'params': give it a list of RRefs.")
        params = group["params"]
        group["params"] = params = [params] if isinstance(params, PyRRef) else list(params)
        for param in params:
            if not isinstance(param, PyRRef):
                raise TypeError(
                    "DistributedOptimizer can only optimize parameters that RRefs refer to, but one of the params is a "
                    f"{type(param).__name__}: wrap local ones as torchrpc.rpc.RRef(parameter)."
                )
    if not any(group["params"] for group in groups):
        raise ValueError("optimizer got an empty parameter list")
    return groups


def _placeholder(cls: Any, groups: list[dict[str, Any]], args: tuple, kwargs: dict[str, Any]) -> torch.optim.Optimizer:
    """Return a local optimizer of that class, with one dummy parameter for each group."""
    return cls([{**group, "params": [torch.zeros(1)]} for group in groups], *args, **kwargs)
