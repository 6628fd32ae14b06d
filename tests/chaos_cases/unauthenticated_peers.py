"""Part 5: peers that do not belong to the group connect to it and send arbitrary bytes.

The functions of CASES take the system ("torchrpc", or "torch" for torch's own RPC) and return a text of their
observations, or raise AssertionError; tests/python/test_unauthenticated_peers.py runs them, too.
"""

import contextlib
import multiprocessing as mp
import os
import random
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .harness import CaseFailure, Run, case

ANSWER_TIMEOUT_S = 60.0
GARBAGE_CONNECTIONS = 1000


# --- Processes that run functions ---


def rpc_of(system: str) -> Any:
    """Return the RPC module of the system: torchrpc's or torch's."""
    if system == "torchrpc":
        import torchrpc.rpc as rpc
    else:
        import torch.distributed.rpc as rpc
    return rpc


def _run_functions(pipe: Any, env: dict[str, str]) -> None:
    os.environ.update(env)
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((function(*args), ""))
        except BaseException as exc:
            pipe.send((None, f"{type(exc).__name__}: {exc}"))


class Process:
    """A process that runs functions of this module, one after another."""

    def __init__(self, env: dict[str, str] | None = None) -> None:
        context = mp.get_context("spawn")
        self.pipe, child_end = context.Pipe()
        self.process = context.Process(target=_run_functions, args=(child_end, env or {}), daemon=True)
        self.process.start()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        self.pipe.send((function, args))

    def end(self) -> tuple[Any, str]:
        """Wait for the function; return its result and its error text."""
        assert self.pipe.poll(ANSWER_TIMEOUT_S), "a process did not answer"
        return self.pipe.recv()

    def run(self, function: Callable[..., Any], *args: Any) -> tuple[Any, str]:
        self.start(function, *args)
        return self.end()


def join(system: str, rank: int, world_size: int | None, url: str, options: dict[str, Any]) -> int:
    rpc = rpc_of(system)
    backend_options = rpc.TensorPipeRpcBackendOptions(init_method=url, rpc_timeout=20, **options)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=backend_options)
    return os.getpid()


def call(system: str, to: str, function: Callable[..., Any], args: tuple = ()) -> Any:
    return rpc_of(system).rpc_sync(to, function, args=args)


def leave(system: str) -> None:
    rpc_of(system).shutdown(graceful=False)


@contextlib.contextmanager
def group(
    system: str, size: int, url: str = "", dynamic: bool = False, env: dict[str, str] | None = None, **options: Any
) -> Iterator[tuple[list[Process], str]]:
    """Start the workers of a group; yields them and the URL of their rendezvous."""
    if not url:
        from torchrpc.testing import free_port  # not by all processes of a case: some have torch's RPC only

        url = f"tcp://localhost:{free_port()}"
    members = [Process(env) for _ in range(size)]
    try:
        for rank, member in enumerate(members):
            member.start(join, system, rank, None if dynamic else size, url, options)
            if dynamic:
                _expect(member.end())
        if not dynamic:
            for member in members:
                _expect(member.end())
        yield members, url
        for member in members:
            _expect(member.run(leave, system))
    finally:
        for member in members:
            member.process.kill()
            member.process.join()


def _expect(answer: tuple[Any, str]) -> Any:
    """Return the result; AssertionError if there is an error text."""
    value, failure = answer
    assert not failure, failure
    return value


def listening() -> list[tuple[str, int]]:
    """Return the addresses and ports on which this process listens, over TCP."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] != "0A" or fields[9] not in inodes:
                continue
            digits, port = fields[1].split(":")
            words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
            found.append((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


# --- What unauthenticated peers try ---


def run_code(path: str) -> str:
    """A function that no peer outside of the group may run."""
    Path(path).write_text("an unauthenticated peer was here")
    return "ran"


def double(number: int) -> int:
    return 2 * number


def intrude(system: str, url: str, path: str, options: dict[str, Any]) -> str:
    """Join a dynamic group with the address of its store only, and run a function on its first worker."""
    join(system, 7, None, url, options)
    return rpc_of(system).rpc_sync("worker0", run_code, args=(path,))


def peer_with_the_store_only(system: str) -> str:
    """The workers have a secret; a peer that knows only the store's address cannot join."""
    member_options = {"secret": secrets.token_hex(32)} if system == "torchrpc" else {}
    with tempfile.TemporaryDirectory() as folder, group(system, 2, dynamic=True, **member_options) as (members, url):
        failures = []
        for number, peer_options in enumerate([{}, {"secret": secrets.token_hex(32)}] if member_options else [{}]):
            path = f"{folder}/trace{number}"
            peer = Process({"TORCHRPC_INIT_TIMEOUT": "5"})
            _, failure = peer.run(intrude, system, url, path, peer_options)
            peer.process.kill()
            assert not os.path.exists(path), "joined, and its code was run"
            assert failure, "joined"
            failures.append(failure)
        assert _expect(members[1].run(call, system, "worker0", double, (21,))) == 42
        return f"refused: {failures[-1][:160]}"


def garbage(ports: list[tuple[str, int]], count: int, seed: int) -> int:
    """Connect `count` times, send random bytes, and close some connections at once. Return how many were accepted."""
    rng, connected, lingering = random.Random(seed), 0, []
    for number in range(count):
        with contextlib.suppress(OSError):
            peer = socket.create_connection(rng.choice(ports), timeout=5)
            connected += 1
            beginning = rng.choice([b"", b"torchrpc", b"torchrpc\2\0\1\0", b"GET / HTTP/1.1\r\n\r\n"])
            with contextlib.suppress(OSError):
                peer.sendall(beginning + rng.randbytes(rng.choice([0, 1, 16, 100, 5000])))
            if number % 3:
                peer.close()
            else:
                lingering.append(peer)
    for peer in lingering:
        peer.close()
    return connected


def thousand_garbage_connections(system: str) -> str:
    """Calls succeed while unauthenticated peers send random bytes to the ports of a worker."""
    with group(system, 2) as (members, _):
        ports = _expect(members[1].run(listening))
        peer = Process()
        peer.start(garbage, ports, GARBAGE_CONNECTIONS, 5)
        slowest, calls = 0.0, 0
        while not peer.pipe.poll():
            begin = time.monotonic()
            assert _expect(members[0].run(call, system, "worker1", double, (calls,))) == 2 * calls
            slowest, calls = max(slowest, time.monotonic() - begin), calls + 1
        connected = _expect(peer.end())
        peer.process.kill()
        assert _expect(members[0].run(call, system, "worker1", double, (21,))) == 42
        return f"{connected} connections; {calls} calls beside them, the slowest {slowest * 1e3:.0f} ms"


def listens_on_loopback_only(system: str) -> str:
    """If the rendezvous is at localhost, no other machine can reach a worker or the store."""
    with group(system, 2) as (members, _):
        found = sorted({address for member in members for address, _ in _expect(member.run(listening))})
        outside = [address for address in found if not address.startswith("127.") and address != "::1"]
        assert not outside, f"listens on {', '.join(outside)}"
        return f"listens on {', '.join(found)}"


def refuses_functions_that_are_not_listed(system: str) -> str:
    """A worker with an allow-list runs the listed functions and no others."""
    options = {"allowed_functions": [double]} if system == "torchrpc" else {}
    with tempfile.TemporaryDirectory() as folder, group(system, 2, **options) as (members, _):
        path = f"{folder}/trace"
        assert _expect(members[1].run(call, system, "worker0", double, (21,))) == 42
        for function, args in ((os.system, (f"touch {path}",)), (eval, (f"open({path!r}, 'w')",)), (run_code, (path,))):
            _, failure = members[1].run(call, system, "worker0", function, args)
            assert not os.path.exists(path), f"{function.__name__} was run"
            assert "allowed_functions" in failure, failure
        return f"refused: {failure[:160]}"


CASES: list[tuple[str, Callable[[str], str]]] = [
    ("an unauthenticated peer that knows only the store's address", peer_with_the_store_only),
    ("1,000 garbage connections to a live worker", thousand_garbage_connections),
    ("a group at localhost listens on loopback only", listens_on_loopback_only),
    ("functions that are not on the allow-list", refuses_functions_that_are_not_listed),
]


def _register(name: str, function: Callable[[str], str]) -> None:
    def tried(run: Run) -> str:
        try:
            return function(run.system)
        except AssertionError as failure:
            raise CaseFailure(str(failure)) from failure

    case(name, limit=300)(tried)


for _name, _function in CASES:
    _register(_name, _function)
