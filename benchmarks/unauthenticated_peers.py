"""Measures the cost of unauthenticated connections for a worker, while two peers call each other through it.

python benchmarks/unauthenticated_peers.py [connections of each kind] [--a-second RATE]

One process opens connections of four kinds to the worker; none of them authenticates. Prints for each kind: the latency
of the calls without connections, with as many connections to a socket of that process itself (which use the processors,
but not the worker), and with the connections to the worker; how many connections the worker refused; and its memory
before and after. The process connects as fast as it can, which occupies one core, or at the rate of --a-second. Exit
status 1 if a call failed.
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

TO_ITSELF = "connect to themselves"  # the control: the same load without the worker
KINDS = ("random bytes", "close at once", "stop half-way", "slow")
MAX_OPEN = 200  # connections that are kept open
IP_BIND_ADDRESS_NO_PORT = 24  # Linux: connect() chooses the port, and may choose one in use for another target
HANDSHAKE_START = b"torchrpc"  # the first bytes of a handshake: csrc/wire/PROTOCOL.md


# --- on the worker in the middle --------------------------------------------------------------------------------------
def listening_address() -> tuple[str, int]:
    """Return the address of this process's only listening socket."""
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
    """Return how many peers this worker has refused, and its resident memory in KiB."""
    refused = int(rpc.api._get_current_rpc_agent().get_debug_info()["transport.refused_peers"])
    with open("/proc/self/status") as status:
        return refused, next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def forward(tensor):
    return rpc.rpc_sync("far", torch.add, args=(tensor, 1))


# --- the unauthenticated connections ----------------------------------------------------------------------------------
def connect(to: tuple[str, int], kind: str) -> socket.socket:
    # Each kind has its own source address, because a port is not free until a minute after its connection has closed.
    host = f"127.0.0.{2 + [TO_ITSELF, *KINDS].index(kind)}"
    for _ in range(1000):
        connection = socket.socket()
        connection.settimeout(10)
        connection.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
        connection.bind((host, 0))
        try:
            connection.connect(to)
            return connection
        except OSError as error:  # the backlog is full
            failure = error
            connection.close()
            time.sleep(0.001)
    raise ConnectionError(f"cannot connect to {to}") from failure


def send(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the worker has closed it
        connection.sendall(data)


@dataclass(frozen=True)
class Schedule:
    """Iterates `count` times, at most `rate` times a second."""

    count: int
    rate: float

    def __iter__(self) -> Iterator[None]:
        start = time.monotonic()
        for i in range(self.count):
            remaining = start + i / self.rate - time.monotonic()
            if remaining > 0:
                time.sleep(remaining)
            yield


def connect_to_itself(schedule: Schedule) -> None:
    with socket.create_server(("127.0.0.1", 0)) as own:
        for _ in schedule:
            connect(own.getsockname(), TO_ITSELF).close()
            own.accept()[0].close()


def open_connections(kind: str, to: tuple[str, int], schedule: Schedule, started: Event) -> None:
    started.set()
    if kind == TO_ITSELF:
        return connect_to_itself(schedule)
    held: list[socket.socket] = []
    for _ in schedule:
        connection = connect(to, kind)
        if kind == "random bytes":
            send(connection, os.urandom(1024))
        elif kind == "stop half-way":
            send(connection, HANDSHAKE_START)
        elif kind == "slow":
            send(connection, HANDSHAKE_START[:1])
            for other in held[:: MAX_OPEN // 4]:
                send(other, HANDSHAKE_START[1:2])
        if kind == "close at once":
            connection.close()
            continue
        held.append(connection)
        if len(held) > MAX_OPEN:
            held.pop(0).close()
    for connection in held:
        connection.close()


# --- the peers --------------------------------------------------------------------------------------------------------
def call_until(done, least: int = 200) -> list[float]:
    seconds = []
    while len(seconds) < least or not done():
        start = time.perf_counter()
        result = rpc.rpc_sync("middle", forward, args=(torch.ones(4),))
        seconds.append(time.perf_counter() - start)
        if result[0] != 2:
            raise RuntimeError(f"{result[0]} instead of 2")
    return seconds


def calls_with_connections(kind: str, to: tuple[str, int], schedule: Schedule) -> list[float]:
    context = mp.get_context("spawn")
    started = context.Event()
    process = context.Process(target=open_connections, args=(kind, to, schedule, started))
    process.start()
    started.wait(60)
    seconds = call_until(lambda: not process.is_alive())
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the process with connections of kind {kind!r} exited with {process.exitcode}")
    return seconds


def measure(schedule: Schedule) -> None:
    to = rpc.rpc_sync("middle", listening_address)
    call_until(lambda: True, 2000)
    print(f"| {schedule.count:,} connections | s | calls, us | control | with them | refused | KiB | after |")
    print("|-|-|-|-|-|-|-|-|")
    for kind in KINDS:
        without = call_until(lambda: True, 2000)
        control = calls_with_connections(TO_ITSELF, to, schedule)
        refused, before = rpc.rpc_sync("middle", state)
        start = time.monotonic()
        disturbed = calls_with_connections(kind, to, schedule)
        seconds = time.monotonic() - start
        now, after = rpc.rpc_sync("middle", state)
        calls = " | ".join(f"{statistics.median(each) * 1e6:.0f}" for each in (without, control, disturbed))
        print(f"| {kind} | {seconds:.1f} | {calls} | {now - refused:,} | {before:,} | {after:,} |", flush=True)


def work(rank: int, store: str, schedule: Schedule) -> None:
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", num_worker_threads=4)
    rpc.init_rpc(("near", "middle", "far")[rank], rank=rank, world_size=3, rpc_backend_options=options)
    if rank == 0:
        measure(schedule)
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measures what unauthenticated connections cost.")
    parser.add_argument("connections", type=int, nargs="?", default=10_000, help="number of each kind")
    parser.add_argument("--a-second", type=float, default=float("inf"), help="rate; default: no limit")
    args = parser.parse_args()
    if args.connections < 1 or not args.a_second > 0:
        parser.error("connections and --a-second must be positive")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(os.path.join(folder, "store"), Schedule(args.connections, args.a_second)), nprocs=3)
