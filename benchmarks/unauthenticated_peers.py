"""What strangers cost: connections of four kinds to a live worker, while two peers call each other through it.

python benchmarks/unauthenticated_peers.py [connections of each kind] [--a-second RATE]

Prints, for each kind, what the calls took: undisturbed, beside as many connections that go elsewhere (which take the
processors and nothing of the worker), and with the strangers; how many the worker turned away, and its memory before
and after. Strangers come as fast as one process makes them, which takes a core for itself, or at the rate asked for.
Exit status 1 if a call failed.
"""

import argparse
import contextlib
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.synchronize import Event

import torch
import torch.multiprocessing as mp

import torchrpc.rpc as rpc

ELSEWHERE = "go elsewhere"
KINDS = ("random bytes", "close at once", "stop half-way", "slow")
AT_ONCE = 200  # that are held open
IP_BIND_ADDRESS_NO_PORT = 24  # Linux: the port is found in connect(), where those that others use are free, too
GREETING = b"torchrpc"  # how a peer of ours begins: csrc/wire/PROTOCOL.md


# --- on the worker in the middle --------------------------------------------------------------------------------------
def listening_at() -> tuple[str, int]:
    """Where this process does; there is one place."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    with open("/proc/self/net/tcp") as table:
        for line in list(table)[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                host, _, port = fields[1].partition(":")
                return socket.inet_ntoa(int(host, 16).to_bytes(4, sys.byteorder)), int(port, 16)
    raise RuntimeError("no listening socket")


def state() -> tuple[int, int]:
    """How many strangers were turned away, and the resident memory in KiB."""
    refused = int(rpc.api._get_current_rpc_agent().get_debug_info()["transport.refused_peers"])
    with open("/proc/self/status") as status:
        return refused, next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def pass_on(tensor):
    return rpc.rpc_sync("far", torch.add, args=(tensor, 1))


# --- the strangers ----------------------------------------------------------------------------------------------------
def connect(to: tuple[str, int], kind: str) -> socket.socket:
    # Each kind comes from an address of its own: a port is not free again until a minute after the connection's end.
    host = f"127.0.0.{2 + [ELSEWHERE, *KINDS].index(kind)}"
    for _ in range(1000):
        stranger = socket.socket()
        stranger.settimeout(10)
        stranger.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
        stranger.bind((host, 0))
        try:
            stranger.connect(to)
            return stranger
        except OSError as error:  # the backlog is full
            failure = error
            stranger.close()
            time.sleep(0.001)
    raise ConnectionError(f"nobody answers at {to}") from failure


def send(stranger: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # it has been turned away
        stranger.sendall(data)


@dataclass(frozen=True)
class Arrivals:
    count: int
    a_second: float

    def __iter__(self) -> Iterator[None]:
        start = time.monotonic()
        for i in range(self.count):
            early = start + i / self.a_second - time.monotonic()
            if early > 0:
                time.sleep(early)
            yield


def go_elsewhere(arrivals: Arrivals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as own:
        for _ in arrivals:
            connect(own.getsockname(), ELSEWHERE).close()
            own.accept()[0].close()


def strangers(kind: str, to: tuple[str, int], arrivals: Arrivals, begun: Event) -> None:
    begun.set()
    if kind == ELSEWHERE:
        return go_elsewhere(arrivals)
    held: list[socket.socket] = []
    for _ in arrivals:
        stranger = connect(to, kind)
        if kind == "random bytes":
            send(stranger, os.urandom(1024))
        elif kind == "stop half-way":
            send(stranger, GREETING)
        elif kind == "slow":
            send(stranger, GREETING[:1])
            for other in held[:: AT_ONCE // 4]:
                send(other, GREETING[1:2])
        if kind == "close at once":
            stranger.close()
            continue
        held.append(stranger)
        if len(held) > AT_ONCE:
            held.pop(0).close()
    for stranger in held:
        stranger.close()


# --- the peers --------------------------------------------------------------------------------------------------------
def call_until(over, least: int = 200) -> list[float]:
    seconds = []
    while len(seconds) < least or not over():
        start = time.perf_counter()
        result = rpc.rpc_sync("middle", pass_on, args=(torch.ones(4),))
        seconds.append(time.perf_counter() - start)
        if result[0] != 2:
            raise RuntimeError(f"{result[0]} instead of 2")
    return seconds


def calls_beside(kind: str, to: tuple[str, int], arrivals: Arrivals) -> list[float]:
    spawning = mp.get_context("spawn")
    begun = spawning.Event()
    process = spawning.Process(target=strangers, args=(kind, to, arrivals, begun))
    process.start()
    begun.wait(60)
    seconds = call_until(lambda: not process.is_alive())
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the process of strangers that {kind} exited with {process.exitcode}")
    return seconds


def measure(arrivals: Arrivals) -> None:
    to = rpc.rpc_sync("middle", listening_at)
    call_until(lambda: True, 2000)
    print(f"| {arrivals.count:,} peers that | s | calls, us | beside others | with them | turned away | KiB | after |")
    print("|-|-|-|-|-|-|-|-|")
    for kind in KINDS:
        without = call_until(lambda: True, 2000)
        beside = calls_beside(ELSEWHERE, to, arrivals)
        refused, before = rpc.rpc_sync("middle", state)
        start = time.monotonic()
        within = calls_beside(kind, to, arrivals)
        seconds = time.monotonic() - start
        now, after = rpc.rpc_sync("middle", state)
        calls = " | ".join(f"{statistics.median(each) * 1e6:.0f}" for each in (without, beside, within))
        print(f"| {kind} | {seconds:.1f} | {calls} | {now - refused:,} | {before:,} | {after:,} |", flush=True)


def work(rank: int, store: str, arrivals: Arrivals) -> None:
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", num_worker_threads=4)
    rpc.init_rpc(("near", "middle", "far")[rank], rank=rank, world_size=3, rpc_backend_options=options)
    if rank == 0:
        measure(arrivals)
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What strangers cost.")
    parser.add_argument("connections", type=int, nargs="?", default=10_000, help="of each kind")
    parser.add_argument("--a-second", type=float, default=float("inf"), help="how many; default: as fast as they can")
    args = parser.parse_args()
    if args.connections < 1 or not args.a_second > 0:
        parser.error("connections and --a-second must be positive")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(os.path.join(folder, "store"), Arrivals(args.connections, args.a_second)), nprocs=3)
