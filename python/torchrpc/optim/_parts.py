"""The parts of a DistributedOptimizer, one on each owner of parameters: stepped by the core, or by Python.

Both kinds have the same methods: `step`, `state`, `load`. Functions that owners run are at the end; they run on
threads of the pool there.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

# The classes that the core has, by their names there.
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
    """Optimizers of the core; `options` hold nothing else than it knows."""

    def __init__(self, kind: str, groups: list[list[Any]], options: list[Options], lock_free: bool) -> None:
        from torchrpc._C import _DistributedOptimizer

        self._core = _DistributedOptimizer(kind, list(zip(groups, options, strict=True)), lock_free)
        self._options = options
        self._lock = threading.Lock()
        self.remote_optimizers = self._core.remote_optimizers()

    def step(self, context_id: int, options: list[Options]) -> None:
        with self._lock:
            if options != self._options:
                self._core.set_options(options)
                self._options = options
        self._core.step(context_id)

    def state(self) -> list[State]:
        return self._core.state()

    def load(self, states: list[State], _: list[Options]) -> None:
        self._core.load([{name: _tensor(value) for name, value in s.items() if value is not None} for s in states])


class PythonParts:
    """Optimizers of any class, stepped in Python on the owners.

    `groups` and `defaults` are what the class makes of its arguments.
    """

    def __init__(
        self, cls: Callable[..., Any], given: list[Options], args: tuple, kwargs: Options, lock_free: bool
    ) -> None:
        import torchrpc.rpc as rpc

        self._places: dict[Any, list[int]] = {}  # owner -> numbers of its parameters
        mine: dict[Any, dict[int, Options]] = {}  # owner -> its part of each group
        number = 0
        for index, group in enumerate(given):
            for param in group["params"]:
                part = mine.setdefault(param.owner(), {}).setdefault(index, {**group, "params": []})
                part["params"].append(param)
                self._places.setdefault(param.owner(), []).append(number)
                number += 1
        self._groups_of = {owner: list(groups) for owner, groups in mine.items()}
        made = self._on_all(
            lambda owner: rpc.rpc_async(owner, _make, (cls, list(mine[owner].values()), args, kwargs, lock_free))
        )
        self.remote_optimizers = [rref for rref, _, _ in made]
        self._optimizers = dict(zip(self._places, self.remote_optimizers, strict=True))
        self.defaults = made[0][2]
        self.groups = [{key: value for key, value in group.items() if key != "params"} for group in given]
        for owner, (_, groups, _) in zip(self._places, made, strict=True):
            for index, options in zip(self._groups_of[owner], groups, strict=True):
                self.groups[index] = options
        self._known: dict[Any, list[Options]] = {}  # owner -> the options it has, where they are not the first

    def step(self, context_id: int, options: list[Options]) -> None:
        import torchrpc.autograd as dist_autograd
        import torchrpc.rpc as rpc

        dist_autograd._retrieve_context(context_id)  # raises if there is none

        def start(owner: Any) -> Any:
            own = [options[index] for index in self._groups_of[owner]]
            news = None if own == self._known.get(owner) else own
            return rpc.rpc_async(owner, _step, (self._optimizers[owner], context_id, news))

        self._on_all(start)
        self._known = {owner: [options[index] for index in groups] for owner, groups in self._groups_of.items()}

    def state(self) -> list[State]:
        import torchrpc.rpc as rpc

        found = self._on_all(lambda owner: rpc.rpc_async(owner, _state, (self._optimizers[owner],)))
        states: list[State] = [{} for places in self._places.values() for _ in places]
        for places, own in zip(self._places.values(), found, strict=True):
            for place, state in zip(places, own, strict=True):
                states[place] = state
        return states

    def load(self, states: list[State], options: list[Options]) -> None:
        import torchrpc.rpc as rpc

        def start(owner: Any) -> Any:
            own = [states[place] for place in self._places[owner]]
            groups = [options[index] for index in self._groups_of[owner]]
            return rpc.rpc_async(owner, _load, (self._optimizers[owner], own, groups))

        self._on_all(start)

    def _on_all(self, start: Callable[[Any], torch.futures.Future]) -> list[Any]:
        """The results from all owners, asked at once. All have ended when the first error is raised."""
        futures = [start(owner) for owner in self._places]
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


# --- on the owners ---


class _LocalOptimizer:
    """An optimizer of a Python class beside its parameters."""

    # One for the process: trainers may have given the same parameters.
    global_lock = threading.Lock()

    def __init__(
        self, cls: Callable[..., Any], groups: list[Options], args: tuple, kwargs: Options, lock_free: bool
    ) -> None:
        self.params: list[torch.Tensor] = []
        self.lock = threading.Lock() if lock_free else self.global_lock
        # Aliases share memory with the parameters, but not the count of changes by which graphs notice them.
        self.stepped: list[torch.Tensor] = []
        own = []
        for group in groups:
            params = [_checked_param(rref.local_value()) for rref in group["params"]]
            stepped = [torch.nn.Parameter(p.data, p.requires_grad) for p in params] if lock_free else params
            self.params += params
            self.stepped += stepped
            own.append({**group, "params": stepped})
        self.optim = cls(own, *args, **kwargs)

    def step(self, context_id: int, options: list[Options] | None) -> None:
        gradients = _gradients(context_id)
        with self.lock:
            for group, news in zip(self.optim.param_groups, options or [], strict=False):
                _update(group, news)
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
        with self.lock:
            current = self.optim.state_dict()["param_groups"]
            groups = [{**group, **news} for group, news in zip(current, options, strict=True)]
            loaded = {number: state for number, state in enumerate(states) if state}
            self.optim.load_state_dict({"state": loaded, "param_groups": groups})


def _checked_param(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"optimizer can only optimize Tensors, but one of the params is {torch.typename(value)}")
    if not value.is_leaf:
        raise ValueError("can't optimize a non-leaf Tensor")
    return value


def _gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The client has made sure that there is a context: one that has never come here has left no gradients here."""
    import torchrpc.autograd as dist_autograd

    try:
        return dist_autograd.get_gradients(context_id)
    except RuntimeError:
        return {}


def _update(group: Options, news: Options) -> None:
    for key, value in news.items():
        if isinstance(group.get(key), torch.Tensor) and not isinstance(value, torch.Tensor):
            group[key].fill_(value)
        else:
            group[key] = value


def _copied(state: State) -> State:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def _make(cls: Any, groups: list[Options], args: tuple, kwargs: Options, lock_free: bool) -> tuple[Any, list, Options]:
    import torchrpc.rpc as rpc

    local = _LocalOptimizer(cls, groups, args, kwargs, lock_free)
    options = [{key: value for key, value in group.items() if key != "params"} for group in local.optim.param_groups]
    return rpc.RRef(local), options, local.optim.defaults


def _step(optimizer: Any, context_id: int, options: list[Options] | None) -> None:
    optimizer.local_value().step(context_id, options)


def _state(optimizer: Any) -> list[State]:
    return optimizer.local_value().state()


def _load(optimizer: Any, states: Sequence[State], options: Sequence[Options]) -> None:
    optimizer.local_value().load(states, options)
