"""The registry of backends, and how an agent of the backend TENSORPIPE starts: membership and devices of its group."""

import collections
import dataclasses
import enum
import json
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

import torchrpc.rpc.api as api
from torchrpc._C import TensorPipeAgent, WorkerInfo, _is_current_rpc_agent_set

from ._allow_list import resolve
from ._cpp_functions import is_cpp
from ._errors import WorkerLostError
from ._rendezvous import NoPlaceError, init_timeout, served_store, takes_place
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
_DeviceMap = dict[torch.device, torch.device]


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
    """Whether it is a member of BackendType, or of the enum before a later registration."""
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
    """Return the backend's agent; the arguments go to its handler. TypeError if the handler returns None."""
    agent = backend.value.init_backend_handler(*args, **kwargs)
    if agent is None:
        raise TypeError(f"The init_backend_handler of {backend!r} returned None. It must return the agent it has made.")
    return agent


def _init_process_group(store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
    """Return a gloo group, for backends whose workers exchange data before they have agents."""
    return dist.ProcessGroupGloo(store, rank, world_size, DEFAULT_PROCESS_GROUP_TIMEOUT)


# --- Devices ---


def _accelerator() -> torch.device:
    """Return the type of this machine's accelerator; that of CUDA, without devices, if torch is built without one."""
    return torch.accelerator.current_accelerator() or torch.device("cuda")


def _device_count() -> int:
    # The device's own module, since torch.cuda.device_count() leaves CUDA usable in forked child processes.
    return torch.get_device_module(_accelerator()).device_count()


def _tensorpipe_validate_devices(devices: Iterable[torch.device], count: int, kind: str | None = None) -> bool:
    """Return whether a worker with so many accelerators has these devices; `kind` is their type, by default of ours."""
    kind = kind or _accelerator().type
    return all(d.type == "cpu" or (d.type == kind and 0 <= d.index < count) for d in devices)


def _validate_device_maps(
    all_names: list[str],
    all_device_counts: dict[str, int],
    all_device_maps: dict[str, dict[str, _DeviceMap]],
    all_devices: dict[str, list[torch.device]],
    is_static_group: bool = True,
    all_kinds: dict[str, str] | None = None,
) -> None:
    """Raise ValueError for device maps and device lists that do not fit together; the text names the workers."""
    kinds = all_kinds or {}
    for node in all_names:
        devices, count = all_devices[node], all_device_counts[node]
        if len(set(devices)) != len(devices):
            raise ValueError(f"Node {node} has duplicated devices\ndevices = {devices}")
        if not _tensorpipe_validate_devices(devices, count, kinds.get(node)):
            raise ValueError(
                f"Node {node} has devices with invalid indices\ndevices = {devices}\ndevice count = {count}"
            )
    for source in all_names:
        maps = all_device_maps[source]
        if is_static_group and not set(maps).issubset(all_names):
            raise ValueError(
                f"Node {source} has invalid target node names in its device maps\n"
                f"device maps = {maps.keys()}\nnode names = {all_names}"
            )
        for target, device_map in maps.items():
            if len(set(device_map.values())) != len(device_map):
                raise ValueError(
                    f"Node {source} has duplicated target devices in its device map for {target}\n"
                    f"device map = {device_map}"
                )
            for side, node, used in (("source", source, device_map.keys()), ("target", target, device_map.values())):
                known = all_devices.get(node), all_device_counts.get(node), kinds.get(node)
                _validate_side(side, used, source, target, device_map, *known)


def _validate_side(
    side: str,
    used: Any,
    source: str,
    target: str,
    device_map: _DeviceMap,
    devices: Any,
    count: int | None,
    kind: str | None,
) -> None:
    where = f"in its device map for {target}\ndevice map = {device_map}"
    if devices:
        if not (set(used) - {torch.device("cpu")}).issubset(devices):
            raise ValueError(f"Node {source} has unexpected {side} devices {where}\ndevices = {devices}")
    elif count is not None and not _tensorpipe_validate_devices(used, count, kind):
        raise ValueError(f"Node {source} has {side} devices with invalid indices {where}\ndevice count = {count}")


def _create_device_list(
    my_devices: list[torch.device],
    my_device_maps: dict[str, _DeviceMap],
    reverse_device_maps: dict[str, _DeviceMap],
    all_of_mine: Iterable[torch.device] = (),
) -> list[torch.device]:
    """Return the given devices, else those that this worker's maps and the maps of others to this worker name.

    `all_of_mine`: all that this worker has, if it maps devices to those of the same name.
    """
    if not my_devices:
        my_devices = list(all_of_mine)
    if not my_devices:
        maps = [*my_device_maps.values(), *reverse_device_maps.values()]
        my_devices = list({device for map_ in maps for device in map_} - {torch.device("cpu")})
    return sorted(my_devices, key=lambda device: device.index)


def _create_reverse_mapping(
    my_name: str, all_names: list[str], all_device_maps: dict[str, dict[str, _DeviceMap]]
) -> dict[str, _DeviceMap]:
    """Return the maps for replies: from the devices here to those of each worker that has a map to this worker."""
    return {
        node: {target: source for source, target in all_device_maps[node][my_name].items()}
        for node in all_names
        if my_name in all_device_maps[node]
    }


def _start_accelerator(devices: list[torch.device]) -> None:
    if devices and torch.accelerator.is_available():
        torch.get_device_module(_accelerator()).init()


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
        options._allowed = [(callers, names and resolve(names)) for callers, names in options._allowed]
        if world_size:
            return _init_static_group(agent_type, store, name, rank, world_size, rpc_backend_options)
        return _init_dynamic_group(agent_type, store, name, rank, rpc_backend_options)

    vars(init)["_takes_places"] = True
    return init


def can_take_place(backend: Any) -> bool:
    """Whether a worker of that backend can take the place of a lost one."""
    return bool(getattr(backend.value.init_backend_handler, "_takes_places", False))


def _make_agent(
    agent_type: type[TensorPipeAgent], store: dist.Store, name: str, rank: int, world_size: int | None, options: Any
) -> TensorPipeAgent:
    metadata = _describe_devices(
        _device_count(), options.device_maps, options.devices, _accelerator().type, options._maps_to_same_device
    )
    return agent_type(
        store,
        name,
        rank,
        world_size,
        options,
        {},
        [],
        metadata,
        init_timeout=init_timeout().total_seconds(),
        takes_place=takes_place(),
        served_store=served_store(),
    )


def _init_static_group(
    agent_type: type[TensorPipeAgent], store: dist.Store, name: str, rank: int, world_size: int, options: Any
) -> TensorPipeAgent:
    agent = _make_agent(agent_type, store, name, rank, world_size, options)
    if takes_place():
        _take_place(agent)
    _start(agent)
    _exchange_devices(agent)
    return agent


def _take_place(agent: TensorPipeAgent) -> None:
    """Take the place of this worker's earlier process in a group that has formed. NoPlaceError: there is none."""
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
        _exchange_devices(agent)
        return agent


def _start(agent: TensorPipeAgent) -> None:
    try:
        api._init_rpc_states(agent)
    except BaseException:
        agent.shutdown()
        if _is_current_rpc_agent_set():
            api._reset_current_rpc_agent()
        raise


@dataclasses.dataclass(frozen=True)
class _Devices:
    """What the workers of a group know of each other's devices."""

    count: int = 0  # of the accelerator
    maps: dict[str, _DeviceMap] = dataclasses.field(default_factory=dict)
    devices: list[torch.device] = dataclasses.field(default_factory=list)
    kind: str | None = None  # of the accelerator
    maps_to_same_device: bool = False

    def all(self) -> list[torch.device]:
        return [torch.device(self.kind or "cuda", index) for index in range(self.count)]


def _describe_devices(
    count: int, maps: dict[str, _DeviceMap], devices: list[torch.device], kind: str, maps_to_same_device: bool
) -> bytes:
    """Encode devices as JSON for `_read_devices` on other workers. Not a pickle: any peer may write to the store."""
    described = {name: [(str(here), str(there)) for here, there in map_.items()] for name, map_ in maps.items()}
    return json.dumps([count, described, [str(device) for device in devices], kind, maps_to_same_device]).encode()


def _read_devices(metadata: bytes) -> _Devices:
    """Decode what `_describe_devices` has encoded."""
    count, maps, devices, kind, maps_to_same_device = json.loads(metadata)
    read = {name: {torch.device(here): torch.device(there) for here, there in map_} for name, map_ in maps.items()}
    return _Devices(
        int(count), read, [torch.device(device) for device in devices], str(kind), maps_to_same_device is True
    )


def _devices_of(agent: TensorPipeAgent, worker: WorkerInfo) -> _Devices:
    """Return what a worker has said of its devices; C++ workers have none."""
    return _Devices() if is_cpp(agent, worker) else _read_devices(agent._get_metadata(worker.id))


def _exchange_devices(agent: TensorPipeAgent) -> None:
    """Check the devices of all workers against each other, and give this worker's agent its devices and maps.

    In a group without a fixed size, send each member its new maps, by which it also accepts this worker as a member.
    """
    try:
        me, workers = agent.get_worker_info(), agent.get_worker_infos()
        known = {worker.name: _devices_of(agent, worker) for worker in workers}
        names = list(known)
        maps = {name: of.maps for name, of in known.items()}
        _validate_device_maps(
            names,
            {name: of.count for name, of in known.items()},
            maps,
            {name: of.devices for name, of in known.items()},
            agent.is_static_group,
            {name: of.kind for name, of in known.items() if of.kind},
        )
        maps_to_same_device = any(of.maps_to_same_device for of in known.values())
        for name in [me.name] if agent.is_static_group else names:
            reverse_maps = _create_reverse_mapping(name, names, maps)
            mine = known[name].all() if maps_to_same_device else []
            used = _create_device_list(known[name].devices, maps[name], reverse_maps, mine)
            if name == me.name:
                _start_accelerator(used)
                agent._set_devices(used, reverse_maps, maps_to_same_device)
            else:
                _update_member(name, me, used, reverse_maps)
        if takes_place():
            api._adopt_gatherings()
        elif agent.is_static_group and (maps_to_same_device or any(maps.values())):
            api._all_gather(None)  # no worker calls by a map before all workers have the maps
    except BaseException:
        api.shutdown(graceful=False)
        raise


def _update_member(name: str, me: WorkerInfo, devices: list[torch.device], reverse_maps: dict[str, _DeviceMap]) -> None:
    try:
        api.rpc_sync(name, _update_group_membership, args=(me, devices, reverse_maps, True))
    except WorkerLostError as exc:
        logger.warning("%s joins a group that has lost %s: %s", me.name, name, exc)


_tensorpipe_init_backend_handler = _init_handler(TensorPipeAgent, TensorPipeRpcBackendOptions)
register_backend("TENSORPIPE", _tensorpipe_construct_rpc_backend_options_handler, _tensorpipe_init_backend_handler)
