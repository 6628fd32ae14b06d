"""The registry of backends, and how an agent of the backend TENSORPIPE starts and becomes a member of its group."""

import collections
import contextlib
import enum
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import torchrpc.rpc.api as api
from torchrpc._C import TensorPipeAgent, _is_current_rpc_agent_set, _used_devices

from ._errors import WorkerLostError
from ._group.accelerator import accelerator
from ._group.rendezvous import NoPlaceError, init_timeout, served_store, takes_place
from ._security.allow_list import resolve
from ._utils import _group_membership_management, _update_group_membership
from .constants import (
    DEFAULT_INIT_METHOD,
    DEFAULT_NUM_WORKER_THREADS,
    DEFAULT_PROCESS_GROUP_TIMEOUT,
    DEFAULT_RPC_TIMEOUT_SEC,
)
from .options import TensorPipeRpcBackendOptions

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]

logger = logging.getLogger(__name__)

BackendValue = collections.namedtuple("BackendValue", ["construct_rpc_backend_options_handler", "init_backend_handler"])


def _make_enum(members: dict[str, BackendValue]) -> Any:
    make: Any = enum.Enum
    made = make("BackendType", members)
    made.__repr__ = lambda self: f"BackendType.{self.name}"
    made.__doc__ = "The registered backends. `BackendType.TENSORPIPE` always exists; see `register_backend`."
    return made


BackendType = _make_enum({})


def backend_registered(backend_name: str) -> bool:
    """Whether a backend of that name is registered."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str, construct_rpc_backend_options_handler: Callable, init_backend_handler: Callable
) -> Any:
    """Add a backend and return its member of BackendType, which is a new enum afterwards.

    Args:
        backend_name (str): its name.
        construct_rpc_backend_options_handler: called as `(rpc_timeout, init_method, **kwargs)`; returns options.
        init_backend_handler: called with the keywords store, name, rank, world_size and rpc_backend_options; returns an
            agent. Only a TensorPipeAgent can make calls; other agents know just the members of the group. The handler
            may start the agent itself, by `api._init_rpc_states(agent)`.

    Raises:
        RuntimeError: the name is registered already.
    """
    global BackendType
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    members = {member.name: member.value for member in BackendType}
    members[backend_name] = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType = _make_enum(members)
    return BackendType[backend_name]


def is_backend(backend: Any) -> bool:
    """Whether `backend` is a member of BackendType, or of that enum before a later registration."""
    return isinstance(backend, enum.Enum) and isinstance(backend.value, BackendValue)


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """Return the backend's options. `rpc_timeout` is in seconds; `kwargs` go to the backend's handler."""
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the backend's agent; the arguments go to its handler. Raises TypeError if the handler returns None."""
    agent = backend.value.init_backend_handler(*args, **kwargs)
    if agent is None:
        raise TypeError(f"The init_backend_handler of {backend!r} returned None. It must return the agent it has made.")
    return agent


def _init_process_group(store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
    """Return a gloo group, for backends whose workers exchange data before they have agents."""
    return dist.ProcessGroupGloo(store, rank, world_size, DEFAULT_PROCESS_GROUP_TIMEOUT)


# --- TENSORPIPE ---


def _tensorpipe_construct_rpc_backend_options_handler(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
    _transports: list[str] | None = None,
    _channels: list[str] | None = None,
    **kwargs: Any,
) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        num_worker_threads=num_worker_threads,
        _transports=_transports,
        _channels=_channels,
    )


def _init_handler(agent_type: type[TensorPipeAgent], options_type: type) -> Callable[..., TensorPipeAgent]:
    """Return an init_backend_handler that makes agents of that type."""

    def init(store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any) -> TensorPipeAgent:
        if not isinstance(store, dist.Store):
            raise TypeError(f"`store` must be a c10d::Store. {store}")
        if not isinstance(rpc_backend_options, options_type):
            raise TypeError(f"`rpc_backend_options` must be a `{options_type.__name__}`. {rpc_backend_options}")
        options: Any = rpc_backend_options
        entries = options._allowed
        options._allowed = [(callers, names and resolve(names)) for callers, names in entries]
        try:
            if world_size:
                agent = _init_static_group(agent_type, store, name, rank, world_size, rpc_backend_options)
            else:
                agent = _init_dynamic_group(agent_type, store, name, rank, rpc_backend_options)
        finally:
            # The agent has a copy. Programs see their own entries, and may use the options again.
            options._allowed = entries
        agent._release_first_calls()
        return agent

    vars(init)["_takes_places"] = True
    return init


def can_take_place(backend: Any) -> bool:
    """Whether a worker of that backend can take the place of a lost one."""
    return bool(getattr(backend.value.init_backend_handler, "_takes_places", False))


def _make_agent(
    agent_type: type[TensorPipeAgent], store: dist.Store, name: str, rank: int, world_size: int | None, options: Any
) -> TensorPipeAgent:
    agent = agent_type(
        store,
        name,
        rank,
        world_size,
        options,
        {},
        [],
        init_timeout=init_timeout().total_seconds(),
        takes_place=takes_place(),
        served_store=served_store(),
    )
    agent._keep_first_calls()
    return agent


def _init_static_group(
    agent_type: type[TensorPipeAgent], store: dist.Store, name: str, rank: int, world_size: int, options: Any
) -> TensorPipeAgent:
    agent = _make_agent(agent_type, store, name, rank, world_size, options)
    if takes_place():
        _take_place(agent)
    _start(agent)
    with _ended_by_errors():
        _start_accelerator()
        if takes_place():
            api._adopt_gatherings()
    return agent


def _take_place(agent: TensorPipeAgent) -> None:
    """Take the place of this worker's earlier process in a formed group. Raises NoPlaceError if there is no place."""
    has_place = False
    try:
        has_place = agent._take_place()
    finally:
        if not has_place:
            agent.shutdown()
    if not has_place:
        raise NoPlaceError


def _init_dynamic_group(
    agent_type: type[TensorPipeAgent], store: dist.Store, name: str, rank: int, options: Any
) -> TensorPipeAgent:
    with _group_membership_management(store, name, True):
        agent = _make_agent(agent_type, store, name, rank, None, options)
        _start(agent)
        with _ended_by_errors():
            _start_accelerator()
            _introduce(agent)
        return agent


def _start(agent: TensorPipeAgent) -> None:
    try:
        api._init_rpc_states(agent)
    except BaseException:
        agent.shutdown()
        if _is_current_rpc_agent_set():
            api._reset_current_rpc_agent()
        raise


@contextlib.contextmanager
def _ended_by_errors() -> Iterator[None]:
    """Shut down the started agent if the block fails."""
    try:
        yield
    except BaseException:
        api.shutdown(graceful=False)
        raise


def _start_accelerator() -> None:
    # Served calls may use the accelerator before this worker's own code does.
    if _used_devices() and torch.accelerator.is_available():
        torch.get_device_module(accelerator()).init()


def _introduce(agent: TensorPipeAgent) -> None:
    """Ask the members of a group without a fixed size to accept this worker, whose record they find in the store."""
    me = agent.get_worker_info()
    for worker in agent.get_worker_infos():
        if worker.name == me.name:
            continue
        try:
            api.rpc_sync(worker.name, _update_group_membership, args=(me, [], {}, True))
        except WorkerLostError as exc:
            logger.warning("%s joins a group that has lost %s: %s", me.name, worker.name, exc)


_tensorpipe_init_backend_handler = _init_handler(TensorPipeAgent, TensorPipeRpcBackendOptions)
register_backend("TENSORPIPE", _tensorpipe_construct_rpc_backend_options_handler, _tensorpipe_init_backend_handler)
