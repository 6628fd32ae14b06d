"""How the workers of a group find the store where they meet.

Only the thread that calls `init_rpc` comes here. env:// and tcp:// are resolved here rather than by torch, because
torch's handlers let rank 0 wait for the whole group inside the store's constructor: a wrong world size, or a wrong
address, would show after half an hour and without a name.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_helper

from torchrpc._C import _ASK_DOCTOR, _listen_where_peers_meet

logger = logging.getLogger(__name__)

_WAIT_VARIABLE = "TORCHRPC_INIT_TIMEOUT"
_FORMED = "formed"
_TELL_AFTER = 10.0  # seconds of silence that make a person wonder
_HOW_TO_MEET = (
    "Set MASTER_ADDR and MASTER_PORT to the host name and a free port of the machine of rank 0, the same for all "
    "workers, or pass rpc_backend_options=TensorPipeRpcBackendOptions(init_method='tcp://host:port'), or "
    "'file:///path' on a file system that all share."
)


def init_timeout() -> timedelta:
    """How long to wait for other workers to come up: TORCHRPC_INIT_TIMEOUT (seconds), or torch's half an hour."""
    text = os.environ.get(_WAIT_VARIABLE)
    if not text:
        limit = dist.constants.default_pg_timeout
        return limit if isinstance(limit, timedelta) else timedelta(seconds=limit)  # some programs put a number there
    try:
        return timedelta(seconds=float(text))
    except ValueError:
        raise ValueError(f"{_WAIT_VARIABLE} must be a number of seconds, but is {text!r}.") from None


def open_store(init_method: str, rank: int, world_size: int | None) -> tuple[dist.Store, int]:
    """The store of that URL and this worker's rank (which the URL or the environment may give).

    Raises:
        ValueError: something is missing in the URL or the environment.
        RuntimeError: no way to the store, or (rank 0) its port is in use.
    """
    url = urlparse(init_method)
    if url.scheme not in ("env", "tcp"):
        return _open_by_torch(init_method, rank, world_size)
    query = {key: values[-1] for key, values in parse_qs(url.query).items()}
    if url.scheme == "env":
        rank = int(query.get("rank", rank)) if rank == -1 else rank
        rank = int(_environment("RANK", "Pass rank= to init_rpc.")) if rank == -1 else rank
        host = _environment("MASTER_ADDR", _HOW_TO_MEET)
        text = _environment("MASTER_PORT", _HOW_TO_MEET)
        port = int(text) if text.isdigit() else -1
    else:
        rank = int(query.get("rank", rank)) if rank == -1 else rank
        if rank == -1:
            raise _url_error("tcp", "rank parameter missing. Pass rank= to init_rpc.")
        if not url.hostname or url.port is None:
            raise _url_error("tcp", f"port number missing in {init_method}. Write tcp://host:port.")
        host, port, text = url.hostname, url.port, str(url.port)
    if not 0 < port < 65536:
        raise ValueError(f"The port to meet at must be a number from 1 to 65535, but is {text!r}. {_HOW_TO_MEET}")
    return _open_tcp(host, port, rank, query.get("use_libuv", os.environ.get("USE_LIBUV", "1")) == "1"), rank


def _environment(name: str, remedy: str) -> str:
    if value := os.environ.get(name):
        return value
    raise _url_error("env", f"environment variable {name} expected, but not set. {remedy}")


def _url_error(scheme: str, text: str) -> ValueError:
    return ValueError(f"Error initializing torch.distributed using {scheme}:// rendezvous: {text}")


def _open_by_torch(init_method: str, rank: int, world_size: int | None) -> tuple[dist.Store, int]:
    """file:// and whatever else has been registered with torch."""
    store, rank, _ = next(_rendezvous_helper(init_method, rank, world_size, timeout=init_timeout()))
    return store, rank


def _open_tcp(host: str, port: int, rank: int, use_libuv: bool) -> dist.Store:
    # Under torchrun the launcher serves the store; otherwise rank 0 does, one for all groups of its process.
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    limit = init_timeout()
    try:
        with _told(f"rank {rank} waits for rank 0 to listen at {host}:{port}. {_HOW_TO_MEET} {_ASK_DOCTOR}."):
            return dist.TCPStore(
                host,
                port,
                None,
                serves,
                limit,
                wait_for_workers=False,
                multi_tenant=True,
                # Left to itself the store would listen on all interfaces.
                master_listen_fd=_listen_where_peers_meet(host, port) if serves else None,
                use_libuv=use_libuv,
            )
    except (RuntimeError, ValueError) as exc:
        if serves:
            told = (
                f"rank 0 cannot serve the group's store at {host}:{port}: {exc}. Is the port in use (by an earlier run "
                f"that has not ended, say)? Choose another MASTER_PORT for all workers. {_ASK_DOCTOR}."
            )
        else:
            told = (
                f"rank {rank} found nobody at {host}:{port}, where rank 0 should listen, in {limit.total_seconds():g} "
                f"s: {exc}. Is rank 0 running, and is this its address? {_HOW_TO_MEET} {_WAIT_VARIABLE} (seconds) says "
                f"how long to wait. {_ASK_DOCTOR}."
            )
        raise type(exc)(told) from exc


@contextlib.contextmanager
def _told(text: str) -> Iterator[None]:
    """Log what the block is waiting for, once, if it takes long."""
    timer = threading.Timer(_TELL_AFTER, logger.warning, ["init_rpc: for %g s %s", _TELL_AFTER, text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def enter_group(root: dist.Store, world_size: int | None) -> dist.Store:
    """The part of `root` that belongs to the group now forming there.

    Groups of a fixed size may follow one another on one store; each has a number, and what tells that a number is used
    up is in the store, not in the process: its members may have been in other groups before, and not in the same ones.
    """
    number = 0
    store = dist.PrefixStore("rpc_prefix_0", root)
    while world_size and store.check([_FORMED]):
        number += 1
        store = dist.PrefixStore(f"rpc_prefix_{number}", root)
    return store


def mark_formed(store: dist.Store) -> None:
    """The group that this store is of has come up: the next one must take another."""
    store.set(_FORMED, "1")
