"""The rendezvous: how the workers of a group find their common store.

Runs on the thread that calls `init_rpc`. This module resolves env:// and tcp:// itself, because with torch's handlers
rank 0 waits for the whole group in the store's constructor: a wrong world size or address would be reported only after
half an hour, and without the name of a worker.
"""

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_helper

from torchrpc._C import (
    _ASK_DOCTOR,
    _enter_group,
    _find_launch,
    _find_meeting_place,
    _has_ended,
    _keep_forever,
    _listen_at_rendezvous_host,
    _mark_formed,
    _prepare_store_file,
    _wait_for_name,
    _wait_for_store,
)

from .._errors import RendezvousError, also

logger = logging.getLogger(__name__)

_TIMEOUT_VARIABLE = "TORCHRPC_INIT_TIMEOUT"
_LOG_AFTER_S = 10.0
_NO_LIMIT = timedelta(days=30)
_ALL_INTERFACES = "0.0.0.0"
_HOW_TO_MEET = (
    "Set MASTER_ADDR and MASTER_PORT to the host name and a free port of the machine of rank 0, the same for all "
    "workers, or pass rpc_backend_options=TensorPipeRpcBackendOptions(init_method='tcp://host:port'), or "
    "'file:///path' on a file system that all share."
)


_deadline = math.inf  # of the running init_rpc
_store: dist.Store | None = None  # of the latest group; kept because rank 0's serves workers that leave after rank 0
_SHORT = timedelta(seconds=1)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Limit all waits in the block together to the `init_timeout` at its beginning."""
    global _deadline, _served_store
    _deadline = time.monotonic() + init_timeout().total_seconds()
    try:
        yield
    finally:
        _deadline = math.inf
        _served_store = None


def init_timeout() -> timedelta:
    """Return how long to wait for other workers to start; in a `bounded` block, the time that is left."""
    left = _deadline - time.monotonic()
    return _configured_timeout() if left == math.inf else timedelta(seconds=max(left, 0.001))


def _configured_timeout() -> timedelta:
    """Return TORCHRPC_INIT_TIMEOUT (seconds), or torch's half an hour."""
    text = os.environ.get(_TIMEOUT_VARIABLE)
    if not text:
        limit = dist.constants.default_pg_timeout
        return limit if isinstance(limit, timedelta) else to_timedelta(limit, "default_pg_timeout")
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError(f"{_TIMEOUT_VARIABLE} must be a number of seconds, but is {text!r}.") from None
    return to_timedelta(seconds, _TIMEOUT_VARIABLE)


def to_timedelta(seconds: float, name: str) -> timedelta:
    """Return a time-out for a store; 0, and more than 30 days, become 30 days, which c10d can add to the present time.

    Raises:
        ValueError: a negative number or NaN; the text has the `name` of the argument.
    """
    if not seconds >= 0:
        raise ValueError(f"{name} must not be negative, but is {seconds}. 0: no limit.")
    return timedelta(seconds=seconds) if 0 < seconds < _NO_LIMIT.total_seconds() else _NO_LIMIT


def open_store(init_method: str, rank: int, world_size: int | None, has_secret: bool = False) -> tuple[dist.Store, int]:
    """Return the store of that URL, and this worker's rank, which may come from the URL or the environment.

    Args:
        has_secret (bool): whether the group was given a secret; without one, the file of a file:// store contains the
            secret and must be private.

    Raises:
        ValueError, mostly also a RendezvousError: something is missing in the URL or the environment.
        RendezvousError: the store cannot be reached, or (rank 0) its port is in use.
    """
    url = urlparse(init_method)
    if url.scheme == "file":
        _check_file(url.path, has_secret)
    if url.scheme not in ("env", "tcp"):
        return _open_by_torch(init_method, rank, world_size)
    query = {key: values[-1] for key, values in parse_qs(url.query).items()}
    if url.scheme == "env":
        rank = int(query.get("rank", rank)) if rank == -1 else rank
        rank = rank_of_launcher() if rank == -1 else rank
        host, text = _find_meeting_place()
        for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", text)):
            if not value:
                raise _missing(name, _HOW_TO_MEET)
        port = int(text) if text.isdigit() else -1
    else:
        rank = int(query.get("rank", rank)) if rank == -1 else rank
        if rank == -1:
            raise _url_error("tcp", "rank parameter missing. Pass rank= to init_rpc.")
        try:
            url_port = url.port
        except ValueError as error:
            remedy = "Write tcp://host:port, and an IPv6 address in brackets, such as tcp://[::1]:29500."
            raise _url_error("tcp", f"{error}, in {init_method}. {remedy}") from None
        if url_port is None:
            raise _url_error("tcp", f"port number missing in {init_method}. Write tcp://host:port.")
        host, port, text = url.hostname or _ALL_INTERFACES, url_port, str(url_port)
    if not 0 < port < 65536:
        raise ValueError(f"The port to meet at must be a number from 1 to 65535, but is {text!r}. {_HOW_TO_MEET}")
    return _open_tcp(host, port, rank, query.get("use_libuv", os.environ.get("USE_LIBUV", "1")) == "1"), rank


def world_size_of_environment(init_method: str, rank: int = -1) -> int | None:
    """Return the world size of an `env://` URL, of WORLD_SIZE or, if `rank` is -1, of the launcher.

    None: there is no world size, so the group grows.
    """
    url = urlparse(init_method)
    if url.scheme != "env":
        return None
    text = parse_qs(url.query).get("world_size", [os.environ.get("WORLD_SIZE", "")])[-1]
    if text and not text.isdecimal():
        raise ValueError(f"WORLD_SIZE must be a number of workers, but is {text!r}.")
    if text:
        return int(text)
    launch = _find_launch() if rank == -1 else None
    return launch[2] or None if launch else None


def rank_of_launcher() -> int:
    """Return the rank that RANK or the launcher of this process gives.

    Raises:
        ValueError, also a RendezvousError: there is none.
    """
    if launch := _find_launch():
        logger.info("rank %d is from %s", launch[1], launch[0])
        return launch[1]
    raise _missing("RANK", "Pass rank= to init_rpc, or use a launcher.")


def _missing(name: str, remedy: str) -> ValueError:
    return _url_error("env", f"environment variable {name} expected, but not set. {remedy}")


def _url_error(scheme: str, text: str) -> ValueError:
    error = also(RendezvousError, ValueError)
    return error(f"Error initializing torch.distributed using {scheme}:// rendezvous: {text}")


def keep_store(store: dist.Store) -> None:
    """Let the store live until the next group has one, or the process ends."""
    global _store
    _store = store


def shorten_end_of_store() -> None:
    """Let the end of the store take 2 seconds at most: that of a file that was removed takes its whole time-out."""
    if _store is not None:
        _store.set_timeout(min(_store.timeout, _SHORT))


@contextlib.contextmanager
def limited_requests(store: dist.Store, seconds: float) -> Iterator[None]:
    """Let each request to the store in the block fail after these seconds, at the latest; math.inf: as before.

    c10d's FileStore waits for a file that was removed until a second after its time-out.
    """
    before = store.timeout
    store.set_timeout(min(before, to_timedelta(max(seconds - 1, 0.2), "the limit of requests to the store")))
    try:
        yield
    finally:
        store.set_timeout(before)


def _leave_store_to_parent() -> None:
    """Never destroy the store in a forked child: that would wait for the store's thread, which only the parent has."""
    global _store
    if _store is not None:
        _keep_forever(_store)
        _store = None


os.register_at_fork(after_in_child=_leave_store_to_parent)


def _check_file(path: str, has_secret: bool) -> None:
    """Create the file of a store. Raise ValueError if it cannot be created, because c10d would retry until its own
    time-out, or if it contains the group's secret and users other than its owner may read it.
    """
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise _url_error("file", f"{folder} is not a directory. Make it, or use another path, on all workers.")
    if os.path.isdir(path):
        raise _url_error("file", f"{path} is a directory. Add the name of a new file in it.")
    try:
        _prepare_store_file(path, has_secret)
    except RuntimeError as exc:
        raise _url_error("file", f"{exc}. Or use another path, on all workers.") from exc


def _open_by_torch(init_method: str, rank: int, world_size: int | None) -> tuple[dist.Store, int]:
    """Open a store of file://, or of a scheme that has been registered with torch."""
    try:
        store, rank, _ = next(_rendezvous_helper(init_method, rank, world_size, timeout=init_timeout()))
    except RuntimeError as exc:
        if not str(exc).startswith("No rendezvous handler"):
            raise
        raise RendezvousError(
            f"init_method must be a URL such as tcp://host:port, env:// or file:///path, but is {init_method!r}."
        ) from exc
    return store, rank


def _open_tcp(host: str, port: int, rank: int, use_libuv: bool) -> dist.Store:
    # Under torchrun the launcher serves the store. Otherwise rank 0 does, with one store for all groups of its process.
    global _served_store
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    serves = rank == 0 and not is_agents
    _served_store = None if is_agents else (host, port)
    limit = init_timeout()
    try:
        awaited = f"{host} to have an address" if serves else f"rank 0 to listen at {host}:{port}"
        with _log_if_slow(f"rank {rank} waits for {awaited}. {_HOW_TO_MEET} {_ASK_DOCTOR}."):
            _wait_for_meeting_place(host, port, serves)
            return dist.TCPStore(
                host,
                port,
                None,
                serves,
                init_timeout(),
                wait_for_workers=False,
                multi_tenant=True,
                # Without this socket the store would listen on all interfaces.
                master_listen_fd=_listen_at_rendezvous_host(host, port) if serves else None,
                use_libuv=use_libuv,
            )
    except (RuntimeError, ValueError) as exc:
        if serves:
            text = (
                f"rank 0 cannot serve the group's store at {host}:{port}: {str(exc).rstrip('.')}. MASTER_ADDR must be "
                f"an address of this machine. Is another worker of rank 0 running (each worker needs a rank of its "
                f"own), or an earlier run? Choose another MASTER_PORT for all workers if another program has this one. "
                f"{_ASK_DOCTOR}."
            )
        else:
            text = (
                f"rank {rank} found nobody at {host}:{port}, where rank 0 should listen, in {limit.total_seconds():g} "
                f"s: {exc}. Is rank 0 running, and is this its address? {_HOW_TO_MEET} {_TIMEOUT_VARIABLE} (seconds) "
                f"says how long to wait. {_ASK_DOCTOR}."
            )
        raise also(RendezvousError, type(exc))(text) from exc


def _wait_for_meeting_place(host: str, port: int, serves: bool) -> None:
    """Wait until the host name has an address and, unless this process serves the store, a process listens there.

    The client of a TCPStore may pause for most of a minute when its first connection is refused, and fails at once if
    the name has no address yet.
    """
    seconds = init_timeout().total_seconds()
    if why := _wait_for_name(host, seconds) if serves else _wait_for_store(host, port, seconds):
        raise RuntimeError(why)


@contextlib.contextmanager
def _log_if_slow(text: str) -> Iterator[None]:
    """Log once what the block waits for, if it takes longer than `_LOG_AFTER_S`."""
    timer = threading.Timer(_LOG_AFTER_S, logger.warning, ["init_rpc: for %g s %s", _LOG_AFTER_S, text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class NoPlaceError(Exception):
    """The group that was found in the store can no longer be joined: the workers form another one."""


_takes_place = False
_served_store: tuple[str, int] | None = None  # of the running init_rpc: host and port where rank 0 serves


@contextlib.contextmanager
def taking_place(takes_place: bool) -> Iterator[None]:
    """In the block, agents take their worker's place in a formed group if `takes_place`, else they join a new group."""
    global _takes_place
    _takes_place = takes_place
    try:
        yield
    finally:
        _takes_place = False


def takes_place() -> bool:
    """Whether this thread is in a block of `taking_place(True)`."""
    return _takes_place


def served_store() -> tuple[str, int] | None:
    """Return host and port where rank 0 serves the store of the group that forms; None: another process does."""
    return _served_store


def enter_group(
    root: dist.Store, rank: int, world_size: int | None, first: int = 0, may_replace: bool = True
) -> tuple[dist.Store, int, bool]:
    """Return the part of `root` that belongs to this worker's group, the group's number, and whether it has formed.

    Groups may follow one another on one store; each has a number. The store, not the process, records the used numbers,
    because the members of a group may have been in different groups before.

    Args:
        first (int): the smallest number that the group may have.
        may_replace (bool): whether this worker may take a lost worker's place in a group that has formed.
    """
    if not world_size:
        while _has_ended(part := dist.PrefixStore(f"rpc_prefix_{first}", root)):
            first += 1
        return part, first, False
    return _enter_group(root, rank if may_replace else -1, first)


def has_ended(store: dist.Store) -> bool:
    """Whether the group of this part of a store can no longer be joined."""
    try:
        return _has_ended(store)
    except RuntimeError:  # the store has ended
        return False


def mark_formed(store: dist.Store) -> None:
    """Record that this store's group has formed: the next group takes the next number."""
    _mark_formed(store)
