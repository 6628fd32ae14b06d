"""The parts of a DistributedOptimizer, one on each owner of parameters: in C++ (`CppParts`) or Python (`PythonParts`).

Both have the same methods: `step`, `state`, `load`. The functions at the end run on the owners, on threads of the pool.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

# The classes that the core implements -> their names in the core.
CPP: dict[Any, str] = {
    cls: cls.__name__
    for cls in (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.Rprop,
    )
}

Options = dict[str, Any]
State = dict[str, Any]


class CppParts:
    """Optimizers in C++, on the owners.

    Args:
        kind: a name of `CPP`.
        groups: the RRefs of each parameter group.
        options: the options of each group; only keys that the core knows.
        lock_free: see DistributedOptimizer.
    """

    def __init__(self, kind: str, groups: list[list[Any]], options: list[Options], lock_free: bool) -> None:
        from torchrpc._C import _DistributedOptimizer

        self._optimizer = _DistributedOptimizer(kind, list(zip(groups, options, strict=True)), lock_free)
        self._options = options
        self._lock = threading.Lock()
        self.remote_optimizers = self._optimizer.remote_optimizers()

    def step(self, context_id: int, options: list[Options]) -> None:
        with self._lock:
            if options != self._options:
                self._optimizer.set_options(options)
                self._options = options
        self._optimizer.step(context_id)

    def state(self) -> list[State]:
        return self._optimizer.state()

    def load(self, states: list[State], _: list[Options]) -> None:
        self._optimizer.load([{name: _tensor(value) for name, value in s.items() if value is not None} for s in states])


class PythonParts:
    """Optimizers of any class, in Python, on the owners.

    Args:
        cls: the class of the optimizers.
        user_groups: parameter groups with RRefs as "params".
        args, kwargs: further arguments of `cls`.
        lock_free: see DistributedOptimizer.

    Attributes:
        groups, defaults: the options of each group and the default options, as `cls` has completed them.
        remote_optimizers: an RRef to the optimizer of each owner.
    """

    def __init__(
        self, cls: Callable[..., Any], user_groups: list[Options], args: tuple, kwargs: Options, lock_free: bool
    ) -> None:
        import torchrpc.rpc as rpc

        self._indices: dict[Any, list[int]] = {}  # owner -> indices of its parameters among all parameters
        parts: dict[Any, dict[int, Options]] = {}  # owner -> its part of each group
        count = 0
        for index, group in enumerate(user_groups):
            for param in group["params"]:
                part = parts.setdefault(param.owner(), {}).setdefault(index, {**group, "params": []})
                part["params"].append(param)
                self._indices.setdefault(param.owner(), []).append(count)
                count += 1
        self._groups_of = {owner: list(groups) for owner, groups in parts.items()}
        created = self._call_all(
            lambda owner: rpc.rpc_async(owner, _make, (cls, list(parts[owner].values()), args, kwargs, lock_free))
        )
        self.remote_optimizers = [rref for rref, _, _ in created]
        self._optimizers = dict(zip(self._indices, self.remote_optimizers, strict=True))
        self.defaults = created[0][2]
        self.groups = [{key: value for key, value in group.items() if key != "params"} for group in user_groups]
        for owner, (_, groups, _) in zip(self._indices, created, strict=True):
            for index, options in zip(self._groups_of[owner], groups, strict=True):
                self.groups[index] = options
        self._sent_options: dict[Any, list[Options]] = {}  # owner -> the options that the last step sent

    def step(self, context_id: int, options: list[Options]) -> None:
        import torchrpc.autograd as dist_autograd
        import torchrpc.rpc as rpc

        dist_autograd._retrieve_context(context_id)  # raises if there is none

        def start(owner: Any) -> Any:
            own = [options[index] for index in self._groups_of[owner]]
            changed = None if own == self._sent_options.get(owner) else own
            return rpc.rpc_async(owner, _step, (self._optimizers[owner], context_id, changed))

        self._call_all(start)
        self._sent_options = {owner: [options[index] for index in groups] for owner, groups in self._groups_of.items()}

    def state(self) -> list[State]:
        import torchrpc.rpc as rpc

        found = self._call_all(lambda owner: rpc.rpc_async(owner, _state, (self._optimizers[owner],)))
        states: list[State] = [{} for indices in self._indices.values() for _ in indices]
        for indices, own in zip(self._indices.values(), found, strict=True):
            for index, state in zip(indices, own, strict=True):
                states[index] = state
        return states

    def load(self, states: list[State], options: list[Options]) -> None:
        import torchrpc.rpc as rpc

        def start(owner: Any) -> Any:
            own = [states[index] for index in self._indices[owner]]
            groups = [options[index] for index in self._groups_of[owner]]
            return rpc.rpc_async(owner, _load, (self._optimizers[owner], own, groups))

        self._call_all(start)

    def _call_all(self, start: Callable[[Any], torch.futures.Future]) -> list[Any]:
        """Call all owners at once and return their results. Waits for all calls before it raises the first error."""
        futures = [start(owner) for owner in self._indices]
        results, errors = [], []
        for future in futures:
            try:
                results.append(future.wait())
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return results


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(float(value))


# --- Functions that run on the owners ---


class _LocalOptimizer:
    """An optimizer of a Python class, on the worker of its parameters. Any thread may call its methods."""

    # Shared by all optimizers of the process: trainers may optimize the same parameters.
    global_lock = threading.Lock()

    def __init__(
        self, cls: Callable[..., Any], groups: list[Options], args: tuple, kwargs: Options, lock_free: bool
    ) -> None:
        from torchrpc.rpc._security.allow_list import local_value

        self.params: list[torch.Tensor] = []
        self.lock = threading.Lock() if lock_free else self.global_lock
        # With lock_free, these are aliases of the parameters. They share the memory but not the version counter, so
        # graphs that have saved a parameter stay valid.
        self.stepped: list[torch.Tensor] = []
        own = []
        for group in groups:
            params = [_checked_param(local_value(rref)) for rref in group["params"]]
            stepped = [torch.nn.Parameter(p.data, p.requires_grad) for p in params] if lock_free else params
            self.params += params
            self.stepped += stepped
            own.append({**group, "params": stepped})
        self.optim = cls(own, *args, **kwargs)

    def step(self, context_id: int, options: list[Options] | None) -> None:
        _check_options(options or [])
        gradients = _gradients(context_id)
        with self.lock:
            for group, changed in zip(self.optim.param_groups, options or [], strict=False):
                _update(group, changed)
            before = [param.grad for param in self.stepped]
            for param, stepped in zip(self.params, self.stepped, strict=True):
                if stepped is not param:
                    stepped.data = param.data
                stepped.grad = gradients.get(param)
            try:
                self.optim.step()
            finally:
                for stepped, grad in zip(self.stepped, before, strict=True):
                    stepped.grad = grad

    def state(self) -> list[State]:
        with self.lock:
            states = self.optim.state_dict()["state"]
            return [_copied(states.get(number, {})) for number in range(len(self.params))]

    def load(self, states: Sequence[State], options: Sequence[Options]) -> None:
        _check_options(options)
        with self.lock:
            current = self.optim.state_dict()["param_groups"]
            groups = [{**group, **changed} for group, changed in zip(current, options, strict=True)]
            loaded = {number: state for number, state in enumerate(states) if state}
            self.optim.load_state_dict({"state": loaded, "param_groups": groups})


def _check_options(options: Sequence[Options]) -> None:
    """Raise ValueError for options that would replace the parameters: only the creator of the optimizer sets these."""
    if any("params" in group for group in options):
        raise ValueError("the options of a parameter group cannot have params")


def _checked_param(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"optimizer can only optimize Tensors, but one of the params is {torch.typename(value)}")
    if not value.is_leaf:
        raise ValueError("can't optimize a non-leaf Tensor")
    return value


def _gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return this worker's gradients; none if it does not know the context, which the client has checked to exist."""
    import torchrpc.autograd as dist_autograd

    try:
        return dist_autograd.get_gradients(context_id)
    except RuntimeError:
        return {}


def _update(group: Options, changed: Options) -> None:
    for key, value in changed.items():
        if isinstance(group.get(key), torch.Tensor) and not isinstance(value, torch.Tensor):
            group[key].fill_(value)
        else:
            group[key] = value


def _copied(state: State) -> State:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def _make(cls: Any, groups: list[Options], args: tuple, kwargs: Options, lock_free: bool) -> tuple[Any, list, Options]:
    import torchrpc.rpc as rpc
    from torchrpc.rpc._security.allow_list import check_callable

    check_callable(cls)
    local = _LocalOptimizer(cls, groups, args, kwargs, lock_free)
    options = [{key: value for key, value in group.items() if key != "params"} for group in local.optim.param_groups]
    return rpc.RRef(local), options, local.optim.defaults


def _checked_optimizer(rref: Any, method: str) -> _LocalOptimizer:
    """Return the optimizer. Raise NotAllowedError if other workers may not call that method of it."""
    from torchrpc.rpc._security.allow_list import check_method, local_value

    local = local_value(rref)
    if type(local) is not _LocalOptimizer:
        raise TypeError(f"this RRef refers to a {type(local).__qualname__} and not to a part of a DistributedOptimizer")
    check_method(local.optim, method, base=torch.optim.Optimizer)
    return local


def _step(optimizer: Any, context_id: int, options: list[Options] | None) -> None:
    _checked_optimizer(optimizer, "step").step(context_id, options)


def _state(optimizer: Any) -> list[State]:
    return _checked_optimizer(optimizer, "state_dict").state()


def _load(optimizer: Any, states: Sequence[State], options: Sequence[Options]) -> None:
    _checked_optimizer(optimizer, "load_state_dict").load(states, options)
