"""`init_rpc`: checks its arguments, opens the store and starts an agent. One thread at a time runs it."""

import logging
import numbers
import os
from typing import Any

import torch.distributed as dist

import torchrpc.autograd as dist_autograd
import torchrpc.rpc.api as api
import torchrpc.rpc.backend_registry as backend_registry
from torchrpc._C import (
    _MAX_WORLD_SIZE,
    RpcBackendOptions,
    TensorPipeAgent,
    WorkerInfo,
    _is_current_rpc_agent_set,
    _set_profiler_node_id,
)

from .._errors import RendezvousError, RpcError, also
from .rendezvous import (
    NoPlaceError,
    bounded,
    enter_group,
    has_ended,
    init_timeout,
    keep_store,
    open_store,
    rank_of_launcher,
    served_store,
    taking_place,
    to_timedelta,
    world_size_of_environment,
)

logger = logging.getLogger(__name__)

_is_tensorpipe_available = True


def init_rpc(
    name: str | None = None,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
    *,
    rpc_backend: Any = None,
) -> None:
    """Join a group of workers; when it returns, this process can call all of them and serves their calls.

    Args:
        name (str): this worker's name, unique in the group: letters, digits, `_`, `:`, `-`, `.`, shorter than 128.
            Default: `worker` and the rank.
        backend (BackendType): default, and normally the only one: `BackendType.TENSORPIPE`.
        rank (int): this worker's number, from 0. Default: with `env://` the variable RANK, which torchrun sets, or the
            rank that the launcher (Slurm, Open MPI and others) gives.
        world_size (int): the number of workers in the group. Default: with `env://` the variable WORLD_SIZE, or the
            launcher's number if the rank is not given either. Without a number, workers join and leave at run time.
        rpc_backend_options (TensorPipeRpcBackendOptions): threads, time-out, rendezvous, devices; default: 16 threads,
            60 seconds, `env://`.
        rpc_backend (BackendType): another spelling of `backend`.

    Raises:
        TypeError, ValueError, RuntimeError: a wrong argument, or a missing environment variable.
        RendezvousError: the group could not be formed (no worker at the address, a port in use, names or world sizes
            that do not fit). The text names the worker and says what to do.
        RpcError: RPC is initialized already.

    This function waits for the other workers for the seconds in the environment variable TORCHRPC_INIT_TIMEOUT, by
    default for half an hour. Only one thread at a time may call it.

    Functions that other workers call run here only when this function has returned and a few milliseconds have passed,
    or this process has made a call. So they find what the program sets up right after `init_rpc`.
    """
    backend = rpc_backend if backend is None else backend
    backend, rpc_backend_options = _resolve_backend(backend, rpc_backend_options)
    if world_size is None:
        world_size = world_size_of_environment(rpc_backend_options.init_method, rank)
    if name is None:
        rank = rank_of_launcher() if rank == -1 else rank
        name = f"worker{rank}"
    _validate_name_and_ranks(name, rank, world_size)
    if _is_current_rpc_agent_set():
        raise RpcError("RPC is already initialized. Call shutdown() first.")
    with bounded():
        _join_group(backend, name, rank, world_size, rpc_backend_options)


def _join_group(backend: Any, name: str, rank: int, world_size: int | None, options: Any) -> None:
    rpc_timeout = to_timedelta(options.rpc_timeout, "rpc_timeout")
    # Other backends have their own security.
    has_secret = getattr(options, "_has_secret", True)
    store, rank = open_store(options.init_method, rank, world_size, has_secret)
    store.set_timeout(min(init_timeout(), rpc_timeout))
    keep_store(store)
    dist_autograd._init(rank)
    _set_profiler_node_id(rank)
    first = 0
    while True:
        may_replace = backend_registry.can_take_place(backend)
        try:
            group, number, has_formed = enter_group(store, rank, world_size, first, may_replace)
            with taking_place(has_formed):
                _init_rpc_backend(backend, group, name, rank, world_size, options)
            break
        except NoPlaceError:
            first = number + 1
        except RendezvousError:
            if not has_ended(group):
                raise
            # The living group was restored under a later number, in a store that is served again; or the last member
            # of a group that grows has left meanwhile.
            first = number + 1
        except dist.DistError as exc:  # of the store
            raise also(RendezvousError, type(exc))(f"{name}: {_store_lost(exc)}") from exc
    store.set_timeout(rpc_timeout)


def _store_lost(exc: Exception) -> str:
    served = served_store()
    server = f"Rank 0, which serves it at {served[0]}:{served[1]}," if served else "The process that serves it"
    return (
        f"the store through which its group meets does not answer: {exc}. {server} has ended or cannot be reached: "
        "start the group again, and let that process end last."
    )


def _resolve_backend(backend: Any, options: Any) -> tuple[Any, Any]:
    """Return backend and options; if one is missing, derive it from the other."""
    if backend is not None and not backend_registry.is_backend(backend):
        raise TypeError(f"Argument backend must be a member of BackendType, but is {backend!r}.")
    if options is not None and not isinstance(options, RpcBackendOptions):
        raise TypeError(
            "Argument rpc_backend_options must be an instance of RpcBackendOptions, but is a "
            f"{type(options).__name__}. Use TensorPipeRpcBackendOptions(...)."
        )
    if backend is None:
        backend = backend_registry.BackendType.TENSORPIPE if options is None else _infer_backend(options)
    if options is None:
        options = backend_registry.construct_rpc_backend_options(backend)
        if not isinstance(options, RpcBackendOptions):
            raise TypeError(
                f"The construct_rpc_backend_options_handler of {backend!r} must return an instance of "
                f"RpcBackendOptions, but returned a {type(options).__name__}."
            )
    return backend, options


def _infer_backend(options: Any) -> Any:
    for candidate in backend_registry.BackendType:
        if isinstance(options, type(backend_registry.construct_rpc_backend_options(candidate))):
            if candidate.name != "TENSORPIPE":
                logger.warning("RPC uses %r, inferred from its options. Pass backend= to say so.", candidate)
            return candidate
    raise TypeError(f"Could not infer backend for options {options}")


def _validate_name_and_ranks(name: Any, rank: Any, world_size: Any) -> None:
    for argument, value, kind in (("name", name, str), ("rank", rank, numbers.Integral)):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise _type_error(argument, value, kind)
    if world_size is not None and (not isinstance(world_size, numbers.Integral) or isinstance(world_size, bool)):
        raise _type_error("world_size", world_size, numbers.Integral)
    if world_size is not None and world_size < 1:
        raise ValueError(
            f"{name}: world_size must be at least 1, but is {world_size}. Leave it out for a group that grows."
        )
    if rank < -1 or (world_size and rank >= world_size):
        upper = f" to {world_size - 1}, as world_size is {world_size}" if world_size else ""
        raise ValueError(f"{name}: rank must be from 0{upper}, but is {rank}.")
    if max(world_size or 0, rank + 1) > _MAX_WORLD_SIZE:
        got = f"rank is {rank}" if rank >= _MAX_WORLD_SIZE else f"world_size is {world_size}"
        raise ValueError(f"{name}: a group has at most {_MAX_WORLD_SIZE} workers, but {got}.")
    WorkerInfo(name, max(rank, 0))  # raises for an invalid name


def _type_error(argument: str, value: Any, kind: Any) -> RuntimeError:
    return RuntimeError(f"Argument {argument}={value!r} must be of type {kind} but got type {type(value)}")


def _validate_rpc_args(
    backend: Any, store: Any, name: Any, rank: Any, world_size: Any, rpc_backend_options: Any
) -> None:
    """Raise RuntimeError for an argument of the wrong type, ValueError for a number out of range."""
    if not backend_registry.is_backend(backend):
        raise _type_error("backend", backend, backend_registry.BackendType)
    if not isinstance(store, dist.Store):
        raise _type_error("store", store, dist.Store)
    if not isinstance(rpc_backend_options, RpcBackendOptions):
        raise _type_error("rpc_backend_options", rpc_backend_options, RpcBackendOptions)
    _validate_name_and_ranks(name, rank, world_size)
    if rank < 0:
        raise ValueError(f"{name}: rank must be from 0, but is {rank}. Pass rank= to init_rpc.")


def _init_rpc_backend(
    backend: Any = None,
    store: Any = None,
    name: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Run the second half of `init_rpc`, for scripts that have their own store."""
    backend = backend if backend is not None else backend_registry.BackendType.TENSORPIPE
    _validate_rpc_args(backend, store, name, rank, world_size, rpc_backend_options)
    if _is_current_rpc_agent_set():
        raise RpcError("RPC is already initialized. Call shutdown() first.")
    try:
        agent = backend_registry.init_backend(
            backend, store=store, name=name, rank=rank, world_size=world_size, rpc_backend_options=rpc_backend_options
        )
        api._init_rpc_states(agent)
        _log_start(agent)
        _serve_metrics(agent)
    except BaseException:
        if _is_current_rpc_agent_set():  # so that the script can try again
            api._drop_agent()
        raise


def _log_start(agent: Any) -> None:
    if not isinstance(agent, TensorPipeAgent):
        return
    me, count = agent.get_worker_info(), len(agent.get_worker_infos())
    if count == 1 and not agent.is_static_group:
        logger.warning(
            "%s (rank %d) has begun a group that grows, because it was given no world_size: it does not wait for "
            "others. For a group of a fixed size pass world_size=, or set WORLD_SIZE.",
            me.name,
            me.id,
        )
    elif logger.isEnabledFor(logging.INFO):
        group = f"of {count} workers" if agent.is_static_group else f"in a group that grows, of {count} workers now"
        logger.info("%s is rank %d %s; %s", me.name, me.id, group, agent.get_debug_info()["agent.transport"])


def _serve_metrics(agent: Any) -> None:
    if os.environ.get("TORCHRPC_METRICS_PORT") and isinstance(agent, TensorPipeAgent):
        from torchrpc.observe import _prometheus

        _prometheus.serve_by_environment(agent.get_worker_info().name)
