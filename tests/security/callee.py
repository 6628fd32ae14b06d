"""Lies of a callee: a member of a group that answers the calls of a well-behaved worker with what is not true.

    pip install noiseprotocol pyopenssl
    python tests/security/callee.py              # 3,000 lies: to groups with a secret alone, identities and TLS
    python tests/security/callee.py --lies 100000 --seed 7 --groups identities
    python tests/security/callee.py --groups tls --only 431     # one lie again

The group has three workers: an honest one, the caller, and the callee, which is this program. The callee joins as a
legitimate member: it publishes its sealed record in the store, listens on TCP and on a Unix socket, and proves what the
others prove. After each lie that ends its connection it comes back: over a connection that the caller opens, or as a
worker that was started again and announces itself. The connections are of TCP (encrypted), of Unix sockets, and of
rings in shared memory.

Each lie is told in a scenario: calls that the caller makes, of which one request is answered falsely. The true reply
may follow. Meanwhile the caller makes calls to the honest worker. Each call of the caller must end within its time-out
and a second. Afterwards no honest call may have failed or have another result, their latency (99th percentile) may be
at most ten times what it was, the caller's memory, descriptors, RRefs, contexts and outstanding calls must be back, it
must not be busy, no code of the callee may have run, and the caller's log must have escaped what the callee has sent.
Prints a table by kind of lie; exits with 1 if one of these does not hold.
"""

import argparse
import collections
import contextlib
import ctypes
import datetime
import faulthandler
import gc
import itertools
import json
import os
import random
import signal
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cryptography.exceptions import InvalidTag
from lies import HonestCaller, make_certificates, make_identities, tls_files
from replies import (
    BOOKKEEPING,
    ERROR,
    FORGED_LINE,
    GOODBYE,
    PING,
    PONG,
    REPLY,
    Lies,
    Message,
    Moment,
    Request,
    Self,
    Truth,
    handshake_lies,
    integer,
    result,
    shrinking_file,
)
from wire import Accepted, Client, Connection, Identity, Records, Refused, Rings, Seal, hello, record, string

import torchrpc
import torchrpc.autograd as dist_autograd
import torchrpc.rpc as rpc
from torchrpc.optim import DistributedOptimizer
from torchrpc.testing import free_port, start_process

HONEST, CALLER, CALLEE = "worker0", "worker1", "worker2"
NAMES = [HONEST, CALLER, CALLEE]
HONEST_RANK, CALLER_RANK, CALLEE_RANK = range(3)
SECRET = "the secret of the group in which the callee lies"
GROUPS = {"secret": "a secret alone", "identities": "identities", "tls": "TLS certificates"}
TRANSPORTS = {"secret": ["tcp", "unix", "rings"], "identities": ["tcp", "unix", "rings"], "tls": ["tcp", "unix"]}

# The time-outs of calls to the callee: of those to which no reply comes, of others, and of those that must be answered.
SHORT_S, LIMIT_S, LONG_S = 0.3, 1.0, 20.0
EXCESS_S = 1.0  # by which a call may exceed its time-out
LATENCY_FACTOR, LEAST_S = 10, 0.05  # what honest calls may take beside the lies, compared with before; at least this
IDLE_S = 0.3
MORE = {"bytes": 32 << 20, "descriptors": 8, "shared memories": 8}  # what the caller may have more afterwards
EARLY, HANDSHAKE = "reply before the request is complete", "handshake"
SHRINKING = "shared file that shrinks"
TRUE_REPLY = "none: the true reply"
OUTCOMES = ["true answer", "another value", "error", "time-out", "lost", "not told"]
WITH_RREFS = {
    "remote",
    "remote operator",
    "RRef as an argument",
    "RRef of another worker as an argument",
    "RRef as a result",
    "optimizer",
    "named object",
}
LIES_OF_A_LIFE = 6  # before the callee is started again, with a connection of another kind
OVER = {"positions of a ring": "rings", "slab": "rings", "slab that changes": "rings", "records of encryption": "tcp"}
WITHOUT_LIMIT = {"context"}  # a backward pass has no time-out: it ends with the connection, which the callee closes
OBJECT_NAME = "an object of the callee"


# --- the workers -----------------------------------------------------------------------------------------------------
def options_of(kind: str, folder: str, name: str) -> dict[str, Any]:
    """Return the options of a worker by which it and the others trust each other."""
    if kind == "identities":
        return {"identity": f"{folder}/{name}.identity"}
    return {"secret": SECRET} | ({"tls": rpc.TlsOptions(**tls_files(folder, name))} if kind == "tls" else {})


def join(kind: str, rank: int, port: int, folder: str, **more: Any) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}",
        num_worker_threads=4,
        **options_of(kind, folder, NAMES[rank]),
        **more,
    )
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=len(NAMES), rpc_backend_options=options)


def reads_pickles(kind: str) -> bool:
    """Whether the caller of such a group reads pickles: it has a list of allowed functions where names are proved."""
    return kind == "secret"


def be_honest(commands: Any, kind: str, port: int, folder: str) -> None:
    os.dup2(os.open(f"{folder}/{kind}.honest.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    join(kind, HONEST_RANK, port, folder)
    with contextlib.suppress(EOFError):
        commands.recv()
    rpc.shutdown(graceful=False)


def double(number: Any) -> int:
    return number * 2


def double_slowly(number: int) -> int:
    time.sleep(0.05)  # the callee answers another call meanwhile
    return number * 2


def give_rref() -> Any:
    return rpc.RRef(6)


def fail(what: str) -> None:
    raise ValueError(what)


class Scenarios:
    """What the caller does. Each scenario returns whether it has got the true answer.

    `all`: the scenario, the number of requests that the callee can answer falsely, and the number of time-outs that it
    may take.
    """

    def __init__(self) -> None:
        self.problem = ""
        self.limit_s = LIMIT_S
        self._count = 0
        self.all: dict[str, tuple[Callable[[], bool], int, int]] = {
            "operator": (self.operator, 1, 1),
            "function": (self.function, 1, 1),
            "two functions": (self.two_functions, 2, 2),
            "call beside a call to another worker": (self.beside_honest, 1, 1),
            "large arguments": (self.large, 2, 2),
            "remote": (self.remote, 2, 2),
            "remote operator": (self.remote_operator, 2, 2),
            "RRef as an argument": (self.argument, 1, 1),
            "RRef of another worker as an argument": (self.foreign_argument, 1, 2),
            "RRef as a result": (self.result_rref, 2, 2),
            "context": (self.context, 2, 3),
            "optimizer": (self.optimizer, 3, 4),
            "named object": (self.named_object, 2, 3),
            "call with a key": (self.key, 1, 1),
            "cancelled call": (self.cancelled, 1, 1),
            "profile": (self.profile, 1, 1),
        }

    def operator(self) -> bool:
        return use(rpc.rpc_sync(CALLEE, torch.add, (torch.ones(4), 1), timeout=self.limit_s)) == [2, 2, 2, 2]

    def function(self) -> bool:
        return use(rpc.rpc_sync(CALLEE, double, (3,), timeout=self.limit_s)) == 6

    def two_functions(self) -> bool:
        futures = [rpc.rpc_async(CALLEE, double, (3,), timeout=self.limit_s) for _ in range(2)]
        values, errors = [], []
        for future in futures:
            try:
                values.append(use(future.wait()))
            except RuntimeError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return values == [6, 6]

    def beside_honest(self) -> bool:
        self._count += 1
        honest = rpc.rpc_async(HONEST, double_slowly, (self._count,), timeout=20)
        try:
            return self.function()
        finally:
            value = honest.wait()
            if value != self._count * 2:
                self.problem = f"an honest call returned {value!r}, not {self._count * 2}"

    def large(self) -> bool:
        tensor = torch.zeros(1 << 19)
        futures = [rpc.rpc_async(CALLEE, double, (tensor,), timeout=self.limit_s) for _ in range(6)]
        rpc.rpc_async(CALLEE, double, (3,), timeout=self.limit_s).wait()
        return [use(future.wait()) for future in futures] == [6] * 6

    def remote(self) -> bool:
        return use(rpc.remote(CALLEE, double, (3,), timeout=self.limit_s).to_here(timeout=self.limit_s)) == 6

    def remote_operator(self) -> bool:
        rref = rpc.remote(CALLEE, torch.add, (torch.ones(4), 1), timeout=self.limit_s)
        return use(rref.to_here(timeout=self.limit_s)) == 6

    def argument(self) -> bool:
        return use(rpc.rpc_sync(CALLEE, double, (rpc.RRef(5),), timeout=self.limit_s)) == 6

    def foreign_argument(self) -> bool:
        rref = rpc.remote(HONEST, double, (3,), timeout=20)
        return use(rpc.rpc_sync(CALLEE, double, (rref,), timeout=self.limit_s)) == 6

    def result_rref(self) -> bool:
        value = rpc.rpc_sync(CALLEE, give_rref, timeout=self.limit_s)
        if isinstance(value, list) and value:
            value = value[0]
        if not isinstance(value, rpc.PyRRef):
            return False
        return use(value.to_here(timeout=self.limit_s)) == 6

    def context(self) -> bool:
        tensor = torch.ones(4, requires_grad=True)
        with dist_autograd.context() as number:
            product = rpc.rpc_sync(CALLEE, torch.mul, (tensor, 2), timeout=self.limit_s)
            if not (isinstance(product, torch.Tensor) and product.requires_grad and product.dtype.is_floating_point):
                return False
            dist_autograd.backward(number, [product.sum()])
            return use(dist_autograd.get_gradients(number).get(tensor)) == [2, 2, 2, 2]

    def optimizer(self) -> bool:
        parameter = rpc.remote(CALLEE, double, (3,), timeout=self.limit_s)
        optimizer = DistributedOptimizer(torch.optim.SGD, [parameter], lr=0.1)
        with dist_autograd.context() as number:
            optimizer.step(number)
        return True

    def named_object(self) -> bool:
        return use(torchrpc.lookup(OBJECT_NAME).to_here(timeout=self.limit_s)) == 6

    def key(self) -> bool:
        self._count += 1
        key = f"key {self._count}"
        return use(rpc.rpc_sync(CALLEE, double, (3,), timeout=self.limit_s, retries=2, idempotency_key=key)) == 6

    def cancelled(self) -> bool:
        future = rpc.rpc_async(CALLEE, double, (3,), timeout=self.limit_s)
        future.cancel()
        try:
            return use(future.wait()) == 6
        except rpc.CancelledError:
            return True

    def profile(self) -> bool:
        with torch.autograd.profiler.profile():
            return self.function()


def use(value: Any) -> Any:
    """Read all of a value that the callee has sent, as a program would, unless it is too large."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type == "meta" or not 0 < value.numel() <= 1 << 16:
        return value.shape
    with contextlib.suppress(RuntimeError):  # torch has no such operation for this layout or dtype
        if value.is_quantized:
            value = value.dequantize()
        if value.layout != torch.strided:
            value = value.to_dense()
        return value.detach().clone().flatten().tolist()
    return None


def state() -> dict[str, int]:
    """What the caller keeps."""
    gc.collect()
    counts = {name: int(count) for name, count in rpc._rref_context_get_debug_info().items()}
    counts |= {name: int(count) for name, count in dist_autograd._get_debug_info().items()}
    return counts | {
        "bytes": allocated_bytes(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared memories": Path("/proc/self/maps").read_text().count("/memfd:"),
    }


def allocated_bytes() -> int:
    """Return the bytes that are allocated. Resident memory grows beside them, where large texts have left gaps."""
    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")

    class Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in names]

    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):  # not glibc
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    library.mallinfo2.restype = Info
    info = library.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def run_scenario(scenarios: Scenarios, name: str, limit_s: float) -> tuple[str, float, str, str]:
    """Return the outcome, the seconds, the text of the error, and what must not happen."""
    scenario, _, time_outs = scenarios.all[name]
    scenarios.limit_s = limit_s
    scenarios.problem = message = ""
    begin = time.monotonic()
    try:
        outcome = "true answer" if scenario() else "another value"
    except (rpc.WorkerLostError, rpc.RpcTimeoutError, TimeoutError) as error:
        outcome, message = "lost" if isinstance(error, rpc.WorkerLostError) else "time-out", str(error)
    except Exception as error:
        outcome, message = "error", f"{type(error).__name__}: {error}"
    except BaseException as error:
        outcome, message = "error", f"{type(error).__name__}: {error}"
        scenarios.problem = f"the callee raised {type(error).__name__} in the caller"
    seconds = time.monotonic() - begin
    if seconds > time_outs * max(limit_s, LIMIT_S) + EXCESS_S:  # some calls have the default time-out
        scenarios.problem = f"{name} took {seconds:.2f} s"
    return outcome, seconds, message[:300], scenarios.problem


def be_caller(commands: Any, kind: str, port: int, folder: str) -> None:
    os.dup2(os.open(f"{folder}/{kind}.caller.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    faulthandler.register(signal.SIGUSR1)
    more = {} if reads_pickles(kind) else {"allowed_functions": [torch.add]}
    join(
        kind,
        CALLER_RANK,
        port,
        folder,
        rpc_timeout=LIMIT_S,
        slow_call_s=SHORT_S / 2,
        metrics=True,
        audit_log=f"{folder}/{kind}.audit",
        **more,
    )
    scenarios = Scenarios()
    honest: HonestCaller | None = None
    with contextlib.suppress(EOFError):
        while True:
            command, *arguments = commands.recv()
            if command == "run":
                commands.send(run_scenario(scenarios, *arguments))
            elif command == "state":
                commands.send(state())
            elif command == "processor time":
                commands.send(time.process_time())
            elif command == "call honest worker":
                honest = HonestCaller(HONEST)
                honest.start()
                commands.send(None)
            elif command == "stop" and honest:
                honest.stop()
                commands.send((honest.errors, statistics.quantiles([0.0, *honest.seconds], n=100)[-1]))
            else:
                break
    if honest:
        honest.stop()
    rpc.shutdown(graceful=False)


class Worker:
    """The process of a worker, which does what it is told."""

    def __init__(self, body: Callable[..., None], *arguments: Any) -> None:
        import multiprocessing

        self._commands, child_end = multiprocessing.Pipe()
        self.process = start_process(body, child_end, *arguments, daemon=True)
        child_end.close()

    def ask(self, *command: Any, limit_s: float = 60) -> Any:
        """Raises Broken if the process has ended or does not answer."""
        try:
            self._commands.send(command)
            if self._commands.poll(limit_s):
                return self._commands.recv()
        except (EOFError, OSError):
            self.process.join(10)
            raise Broken(f"the caller's process has ended with exit code {self.process.exitcode}") from None
        os.kill(self.process.pid, signal.SIGUSR1)  # its stacks are in its log
        raise Broken(f"the caller hangs: {command}")

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._commands.send(("end",))

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


class Broken(Exception):
    """Something that must hold does not hold, and the attack cannot go on."""


# --- the callee ------------------------------------------------------------------------------------------------------
class Plan:
    """One lie: in which scenario, to which of its requests, and what became of it."""

    def __init__(
        self, number: int, seed: int, lies: list[str], scenarios: Scenarios, callee: "Callee", scenario: str = ""
    ) -> None:
        dice = random.Random(f"{seed}/{number}")
        self.number, self.dice = number, dice
        self.lie = lies[number % len(lies)]
        fitting = {
            "gradients": ["context"],
            "autograd context": ["context", "context", "operator"],
            "request about what it received": [
                "context",
                "RRef as an argument",
                "RRef of another worker as an argument",
            ],
            "id of another call": ["two functions", "call beside a call to another worker"],
            "slab": ["large arguments", "operator"],
            "slab that changes": ["operator"],
            EARLY: ["large arguments"],
            HANDSHAKE: ["operator", "function"],
            SHRINKING: ["operator"],
        }
        choices = fitting.get(self.lie, list(scenarios.all))
        if callee.is_lost:
            choices = [each for each in choices if each not in WITH_RREFS] or ["operator"]
        self.scenario = scenario or dice.choice(choices)
        requests = scenarios.all[self.scenario][1]
        self.target = dice.randrange(requests)
        # The requests that its sender repeats until they are answered come after the scenario, or beside it.
        self.targets_bookkeeping = (
            self.scenario in WITH_RREFS and self.lie not in fitting and not scenario and dice.random() < 0.2
        )
        if self.lie == "gradients":
            self.target = dice.randrange(1, requests)
        self.lies = Lies(dice, callee.me, callee.recorded, callee.marker)
        self.then = "truth" if self.lie == TRUE_REPLY else dice.choice(["truth"] * 9 + ["silence"])
        self.transport = ""
        self.is_told = self.spoils = False
        self.failure = ""  # of this program
        self.sent: list[bytes] = []
        self._arrived = 0
        self.held: list[tuple[Request, Message]] = []

    def function_result(self) -> str:
        return "rref" if self.scenario == "RRef as a result" else "number"

    def is_now(self, request: Request) -> bool:
        """Whether the lie is told in the place of the reply to that request."""
        if self.is_told:
            return False
        if request.kind in BOOKKEEPING:
            return self.targets_bookkeeping
        self._arrived += 1
        return not self.targets_bookkeeping and self._arrived == self.target + 1


class Callee:
    """The member that lies: its place in the group, where it listens, and its connections."""

    def __init__(self, kind: str, port: int, folder: str) -> None:
        self.kind = kind
        text = Path(folder, f"{CALLEE}.identity").read_text() if kind == "identities" else ""
        self.identity = Identity(text, SECRET.encode())
        self.tls = tls_files(folder, CALLEE) if kind == "tls" else None
        self.marker = Path(folder, f"{kind}: made by a pickle")
        self.recorded: list[bytes] = []
        self.plan: Plan | None = None
        self.twist: Callable[[str, Any], Any] | None = None
        self.me = Self(CALLEE_RANK, time.time_ns(), CALLER_RANK)
        self._is_over = False
        self._lock = threading.Lock()
        self._connections: list[Connection] = []  # with the caller
        self._listener_id = random.SystemRandom().randrange(1, 2**64)
        self._unix_name = f"lying-callee-{self._listener_id:x}"
        self._listeners = {"tcp": socket.create_server(("127.0.0.1", 0)), "unix": socket.socket(socket.AF_UNIX)}
        self._listeners["unix"].bind("\0" + self._unix_name)
        self._listeners["unix"].listen()
        for over in self._listeners:
            threading.Thread(target=self._accept, args=(over,), daemon=True).start()
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=60))
        self.store = dist.PrefixStore("rpc_prefix_0", store)
        self._seal = Seal(self.identity.secret)
        self.over = "tcp"
        self.is_lost = False  # the caller has lost this start of the callee, and fails all that is about its RRefs

    # --- its place ---

    def address(self, over: str) -> str:
        port = self._listeners["tcp"].getsockname()[1]
        address = f"native:id={self._listener_id:x};tcp=127.0.0.1:{port}"
        if over == "tcp":
            return address
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{address};host={boot}.{os.stat('/proc/self/ns/net').st_ino};unix={self._unix_name}"

    def record(self, over: str) -> bytes:
        return record(CALLEE_RANK, CALLEE, self.me.incarnation, self.address(over), len(NAMES), True)

    def publish(self, over: str) -> None:
        """Publish the record, as a worker does that joins, and a name of an object; be ready when the others are."""
        self.over = over
        self._publish(f"worker/{CALLEE_RANK}", self.record(over))
        self._publish(f"named/{OBJECT_NAME}", f"{1:016x} {CALLEE}".encode())
        self._seal.bind_to([Seal.content(bytes(self.store.get(f"worker/{rank}"))) for rank in range(len(NAMES))])
        self._publish(f"ready/{CALLEE_RANK}", b"0")

    def _publish(self, key: str, value: bytes) -> None:
        self.store.set(key, self._seal.seal(key, value))

    def address_of(self, rank: int) -> str:
        stored = Seal.content(bytes(self.store.get(f"worker/{rank}")))
        at = 4
        for _ in range(2):  # the name, the address
            size = struct.unpack_from("<Q", stored, at)[0]
            content = stored[at + 8 : at + 8 + size]
            at += 8 + size
        return content.decode()

    def connect(self, rank: int, over: str) -> Client:
        client = Client(
            self.address_of(rank),
            self.identity,
            CALLEE,
            over="tcp" if over == "tcp" else "unix",
            tls=self.tls,
            shares_memory=over == "rings",
        )
        client.send(hello(CALLEE_RANK, CALLEE, self.me.incarnation))
        return client

    def start_again(self, over: str, stays: bool) -> None:
        """Announce a new start of this callee. `stays`: the caller sends its calls over the connection of the
        announcement; otherwise it opens one.
        """
        self.disconnect()
        self.over = over
        self.me = Self(CALLEE_RANK, max(time.time_ns(), self.me.incarnation + 1000), CALLER_RANK)
        for rank in (HONEST_RANK, CALLER_RANK):
            client = self.connect(rank, over)
            client.send(Message(53, 1, string(self.record(over))).stream())
            is_answered = threading.Event()
            thread = threading.Thread(target=self._serve, args=(client, rank, is_answered), daemon=True)
            thread.start()
            if not is_answered.wait(20):
                raise Broken(f"{NAMES[rank]} does not answer the announcement of a new start")
            if rank == HONEST_RANK or not stays:
                with contextlib.suppress(OSError):  # the other side has ended it
                    client.socket.shutdown(socket.SHUT_RDWR)
                thread.join()
        self.is_lost = not stays

    def disconnect(self) -> None:
        while True:
            with self._lock:
                connections = list(self._connections)
            if not connections:
                return
            for connection in connections:  # the caller may have opened another one meanwhile
                with contextlib.suppress(OSError):
                    connection.socket.shutdown(socket.SHUT_RDWR)
            time.sleep(0.001)  # between two looks at a condition: the threads that serve the connections end

    def is_connected(self) -> bool:
        with self._lock:
            return bool(self._connections)

    def close(self) -> None:
        """Leave without a word."""
        self._is_over = True
        for listener in self._listeners.values():
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.disconnect()

    # --- its connections ---

    def _accept(self, over: str) -> None:
        while not self._is_over:
            try:
                connected = self._listeners[over].accept()[0]
            except OSError:
                return
            threading.Thread(target=self._shake_hands, args=(connected, over), daemon=True).start()

    def _shake_hands(self, connected: socket.socket, over: str) -> None:
        twist, plan = self.twist, self.plan
        try:
            accepted = Accepted(
                connected,
                self._listener_id,
                self.identity,
                CALLEE,
                over,
                tls=self.tls,
                shares_memory=self.over == "rings",
                twist=twist or (lambda part, value: value),
            )
        except (Refused, OSError, InvalidTag, ValueError):
            connected.close()
            return
        except Exception:
            if plan and not twist:
                plan.failure = traceback.format_exc()
            connected.close()
            return
        self._serve(accepted, NAMES.index(accepted.peer) if accepted.peer in NAMES else HONEST_RANK)

    def _serve(self, connection: Connection, peer: int, is_announced: threading.Event | None = None) -> None:
        connection.settimeout(600)
        if peer == CALLER_RANK:
            with self._lock:
                self._connections.append(connection)
        try:
            while True:
                kind, call, head = connection.receive(lambda kind, call: self._begin(connection, peer, kind, call))
                if kind == PING:
                    connection.send(Message(PONG, 0).stream())
                elif kind == GOODBYE:
                    return
                elif kind in (REPLY, ERROR) and is_announced:
                    is_announced.set()
                elif kind >= 16:
                    self._answer(connection, peer, Request(kind, call, head))
        except (Refused, OSError, InvalidTag, struct.error):
            pass
        except Exception:
            if self.plan:
                self.plan.failure = traceback.format_exc()
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._connections.remove(connection)
            connection.close()

    def _begin(self, connection: Connection, peer: int, kind: int, call: int) -> None:
        """Reply when the first bytes of a request have arrived."""
        plan = self.plan
        if not plan or plan.lie != EARLY or plan.is_told or peer != CALLER_RANK or kind < 16 or kind in BOOKKEEPING:
            return
        self._note(plan, connection)
        replies = [Message(REPLY, call, result(integer(6))), Message(ERROR, call, plan.lies.error_payload(5, b"early"))]
        connection.send(plan.dice.choice(replies).stream())
        then = plan.dice.choice(["read", "read", "close", "silence"])
        if then == "close":
            raise Refused("ended by this callee")
        if then == "silence":
            plan.spoils = True
            self._wait_until_replaced(plan)
            raise Refused("ended by this callee")

    def _wait_until_replaced(self, plan: Plan) -> None:
        while self.plan is plan and not self._is_over:
            time.sleep(0.005)  # this callee reads nothing, until the scenario is over

    @staticmethod
    def _note(plan: Plan, connection: Connection) -> None:
        plan.is_told = True
        stream = connection.stream
        is_tcp = isinstance(stream, Records) or connection.socket.family == socket.AF_INET
        plan.transport = "rings" if isinstance(stream, Rings) else "tcp" if is_tcp else "unix"

    def _answer(self, connection: Connection, peer: int, request: Request) -> None:
        plan, truth = self.plan, Truth(self.me)
        if plan is None or peer != CALLER_RANK:
            connection.send(truth.reply(request, "number").stream())
            return
        truth.note(request)
        reply = truth.reply(request, plan.function_result())
        if not plan.is_now(request):
            # Of two calls the first one waits for its reply while the lie about the second one is told.
            if plan.scenario == "two functions" and plan.target == 1 and not plan.is_told and request.kind >= 16:
                plan.held.append((request, reply))
            else:
                connection.send(reply.stream())
            return
        self._note(plan, connection)
        if plan.lie in (HANDSHAKE, SHRINKING):  # the handshake was legitimate nevertheless
            connection.send(reply.stream())
            return
        before = reply.stream()
        waiting = [held.call for held, _ in plan.held]
        told = plan.lies.kinds[plan.lie](Moment(request, connection, reply, waiting))
        plan.sent = told.pieces
        then = told.then or plan.then
        plan.spoils = told.spoils
        connection.send(b"".join(told.pieces))
        if then == "close":
            if not isinstance(connection.stream, Rings):
                # The caller reads what was sent, then it closes the connection.
                connection.socket.shutdown(socket.SHUT_WR)
                connection.settimeout(SHORT_S)
                with contextlib.suppress(Refused):
                    while True:
                        connection.read(1)
            raise Refused("ended by this callee")
        if then == "truth":
            connection.send(before)
        for _, held in plan.held:
            connection.send(held.stream())
        if told.spoils:
            self._wait_until_replaced(plan)
            raise Refused("ended by this callee")

    # --- what it learns ---

    def record_errors(self) -> None:
        """Keep the frames of true errors, in which lies change something."""
        client = self.connect(HONEST_RANK, "tcp")
        client.settimeout(10)
        for text in ("a text", "\x1b[31m two\nlines"):
            plain = [b"\0\0", string(b"callee"), string(b"fail"), b"\x0a" + struct.pack("<I", 1)]
            plain += [b"\6" + string(text.encode()), b"\x0b" + struct.pack("<I", 0)]
            client.send(Message(18, 1, b"".join(plain)).stream())
            kind, _, head = client.receive()
            if kind == ERROR:
                self.recorded.append(struct.pack("<QII", len(head), 0, 0) + head)
        client.close()


# --- the run ---------------------------------------------------------------------------------------------------------
class Attack:
    """A group, and lies to it."""

    def __init__(self, kind: str, seed: int, folder: str, kinds: list[str] | None) -> None:
        self.kind, self.seed, self.folder = kind, seed, folder
        self.dice = random.Random(f"{seed}/{kind}")
        self.broken: list[str] = []
        self.table: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        self.latencies_s = (0.0, 0.0)
        self.told_in_life = 0
        port = free_port()
        self.honest = Worker(be_honest, kind, port, folder)
        self.caller = Worker(be_caller, kind, port, folder)
        self.callee = Callee(kind, port, folder)
        self.transports = itertools.cycle(TRANSPORTS[kind])
        self.callee.publish(next(self.transports))
        self.scenarios = Scenarios()
        left_out = {"pickle"} if reads_pickles(kind) else set()
        if kind == "tls":
            left_out |= {"positions of a ring", "slab that changes"}
        lies = Lies(self.dice, self.callee.me, [], self.callee.marker)
        self.lies = kinds or [each for each in [*lies.kinds, EARLY, HANDSHAKE] if each not in left_out]

    def probe(self) -> None:
        """Wait until the caller gets true answers."""
        end = time.monotonic() + 20
        self.callee.plan = self.callee.twist = None
        while True:
            outcome = self.caller.ask("run", "function", LIMIT_S)
            if outcome[0] == "true answer":
                return
            if time.monotonic() > end:
                raise Broken(f"the caller gets no true answers any more: {outcome}")

    def rehearse(self) -> None:
        """Answer each scenario truthfully. What this leaves is no growth: code, caches, threads."""
        for name in self.scenarios.all:
            plan = self.callee.plan = Plan(0, self.seed, [TRUE_REPLY], self.scenarios, self.callee, name)
            outcome = self.caller.ask("run", name, LONG_S)
            if outcome[0] != "true answer" or plan.failure:
                raise Broken(f"true replies do not lead to the true answer: {name}, {outcome}, {plan.failure}")

    def renew(self, over: str = "") -> None:
        """Let the callee come back in one of the possible ways, or over a connection of that kind."""
        way = self.dice.randrange(1 if over else 0, 4)
        self.callee.plan = self.callee.twist = None
        self.told_in_life = 0
        if way == 0:
            self.callee.disconnect()
            self.callee.is_lost = True
        else:
            self.callee.start_again(over or next(self.transports), stays=way > 1)
        self.probe()

    def tell(self, number: int) -> None:
        """Tell one lie, and check what the caller does."""
        wanted = OVER.get(self.lies[number % len(self.lies)], self.callee.over)
        if wanted != self.callee.over and wanted in TRANSPORTS[self.kind]:
            self.renew(wanted)
        plan = Plan(number, self.seed, self.lies, self.scenarios, self.callee)
        name = plan.lie
        if plan.lie == HANDSHAKE:
            self.callee.disconnect()
            part, self.callee.twist = handshake_lies(plan.dice, plan.lies)
            self.callee.is_lost = True
            name = f"{HANDSHAKE}: {part}"
        elif plan.lie == SHRINKING:
            self.callee.start_again("rings", stays=False)
            self.callee.disconnect()
            self.callee.twist = shrinking_file(self.folder)
        if self.callee.twist:
            plan.transport, plan.is_told = self.callee.over, True
        self.callee.plan = plan
        begin = time.monotonic()
        limit_s = LONG_S if plan.lie == TRUE_REPLY else SHORT_S if plan.then == "silence" else LIMIT_S
        patience = threading.Timer(2 * SHORT_S, self.callee.disconnect)
        if plan.scenario in WITHOUT_LIMIT:
            patience.start()
        outcome, seconds, text, problem = self.caller.ask("run", plan.scenario, limit_s)
        patience.cancel()
        # The requests about RRefs follow when the scenario is over.
        while plan.targets_bookkeeping and not plan.is_told and time.monotonic() - begin < seconds + 0.05:
            time.sleep(0.002)  # between two looks at a condition
        self.callee.twist = None
        if plan.failure:
            raise Broken(f"this program failed in lie {number}: {plan.failure}")
        where = f"lie {number} ({name}, {plan.scenario}, request {plan.target}, {plan.transport}, {outcome}: {text!r})"
        if problem:
            self.broken.append(f"{where}: {problem}")
        if plan.lie == TRUE_REPLY and plan.is_told and outcome != "true answer":
            self.broken.append(f"{where}: the true reply does not lead to the true answer")
        counts = self.table[name]
        counts[outcome if plan.is_told else "not told"] += 1
        counts[plan.transport] += 1
        self.told_in_life += 1
        if plan.spoils or not self.callee.is_connected() or self.told_in_life >= LIES_OF_A_LIFE:
            self.renew()

    def settled(self, before: dict[str, int], limit_s: float = 20) -> dict[str, int]:
        """Return the caller's state when it is back, or after the limit."""
        end = time.monotonic() + limit_s
        while True:
            after = self.caller.ask("state")
            if not self.grown(before, after) or time.monotonic() > end:
                return after
            time.sleep(0.2)  # between two looks at a condition

    def check_idle(self) -> None:
        """A caller that waits for nothing must not be kept busy by a connection that is still open."""
        before_s = self.caller.ask("processor time")
        time.sleep(IDLE_S)  # measures
        used_s = self.caller.ask("processor time") - before_s
        if used_s > IDLE_S / 2:
            self.broken.append(f"the idle caller uses {used_s:.2f} s of processor time in {IDLE_S} s")

    @staticmethod
    def grown(before: dict[str, int], after: dict[str, int]) -> list[str]:
        return [
            f"{name}: {before[name]} before, {after[name]} afterwards"
            for name in after
            if after[name] > before[name] + MORE.get(name, 0)
        ]

    def run(self, numbers: range, quiet_s: float) -> None:
        """Tell the lies of these numbers."""
        try:
            self.probe()
            self.callee.record_errors()
            self.rehearse()
            before = self.caller.ask("state")
            # What the first lies of each kind leave is no growth: code, caches, log lines.
            for number in range(-len(self.lies), 0) if len(numbers) > 1000 else ():
                self.tell(number)
            if len(numbers) > 1000:
                before |= {"bytes": self.caller.ask("state")["bytes"]}
            self.caller.ask("call honest worker")
            time.sleep(quiet_s)  # measures
            errors, quiet_p99_s = self.caller.ask("stop")
            self.caller.ask("call honest worker")
            for number in numbers:
                self.tell(number)
            errors, p99_s = self.caller.ask("stop")
            self.latencies_s = quiet_p99_s, p99_s
            self.broken += errors[:3]
            limit_s = max(LATENCY_FACTOR * quiet_p99_s, LEAST_S)
            if p99_s > limit_s:
                self.broken.append(f"honest calls took {p99_s:.3f} s (p99), {quiet_p99_s:.4f} s before")
            self.check_idle()
            self.callee.close()
            self.broken += self.grown(before, self.settled(before))
        except Broken as broken:
            self.broken.append(str(broken))
            self.broken.append(f"latest lie: {self.described(self.callee.plan)}")
        finally:
            self.end()
        self.check_what_is_left()

    @staticmethod
    def described(plan: Plan | None) -> str:
        if plan is None:
            return "none"
        sent = b"".join(plan.sent)
        return f"{plan.number} ({plan.lie}, {plan.scenario}, {plan.transport}): {len(sent)} bytes, {sent[:400].hex()}"

    def end(self) -> None:
        self.callee.close()
        for worker in (self.caller, self.honest):
            worker.end()
        for name, worker in (("caller", self.caller), ("honest worker", self.honest)):
            worker.process.join(30)
            if worker.process.exitcode != 0:
                self.broken.append(f"the exit code of the {name} is {worker.process.exitcode}")
            worker.kill()

    def check_what_is_left(self) -> None:
        """Look at the logs, and whether a pickle was read."""
        if self.callee.marker.exists() and not reads_pickles(self.kind):
            self.broken.append("the caller has read a pickle")
        for who in ("caller", "honest"):
            log = Path(self.folder, f"{self.kind}.{who}.log").read_bytes().decode(errors="surrogateescape")
            for line in log.split("\n"):
                is_control = any((ord(each) < 32 and each != "\t") or 127 <= ord(each) < 160 for each in line)
                is_malformed = any(0xDC80 <= ord(each) <= 0xDCFF for each in line)
                if is_control or is_malformed or line.startswith(FORGED_LINE):
                    self.broken.append(f"the log of the {who} has the line {line[:300]!r}")
                    break
        for line in Path(self.folder, f"{self.kind}.audit").read_text().splitlines():
            try:
                json.loads(line)
            except ValueError:
                self.broken.append(f"the audit log has the line {line[:300]!r}")
                break


def print_table(attack: Attack) -> None:
    transports = TRANSPORTS[attack.kind]
    columns = [*transports, *OUTCOMES]
    print("| lie | sent | " + " | ".join(columns) + " |\n|-|-|" + "-|" * len(columns))
    for name, counts in sorted(attack.table.items()):
        sent = sum(counts[outcome] for outcome in OUTCOMES)
        print(f"| {name} | {sent} | " + " | ".join(str(counts[each] or "") for each in columns) + " |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lies", type=int, default=3000, help="in all; default: 3,000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="tell only the lie of that number")
    parser.add_argument("--kinds", nargs="+", help="tell only lies of these kinds; default: all")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), help="default: of all kinds")
    parser.add_argument("--quiet", type=float, default=2, help="seconds of honest calls before the lies; default: 2")
    parser.add_argument("--folder", help="where to keep the logs; default: they are removed")
    arguments = parser.parse_args()
    is_broken = False
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or stack.enter_context(tempfile.TemporaryDirectory())
        if "identities" in arguments.groups:
            make_identities(folder, NAMES, [])
        if "tls" in arguments.groups:
            make_certificates(folder, NAMES, [])
        for kind in arguments.groups:
            begin = time.monotonic()
            print(f"\na group with {GROUPS[kind]}, seed {arguments.seed}:", flush=True)
            count = arguments.lies // len(arguments.groups)
            only = arguments.only
            attack = Attack(kind, arguments.seed, folder, arguments.kinds)
            attack.run(range(count) if only is None else range(only, only + 1), arguments.quiet)
            print_table(attack)
            quiet_s, beside_s = attack.latencies_s
            print(f"p99 of honest calls: {quiet_s * 1e3:.2f} ms before, {beside_s * 1e3:.2f} ms beside the lies")
            verdict = "all holds" if not attack.broken else "BROKEN:\n  " + "\n  ".join(attack.broken)
            print(f"{time.monotonic() - begin:.0f} s; {verdict}", flush=True)
            is_broken = is_broken or bool(attack.broken)
    return 1 if is_broken else 0


if __name__ == "__main__":
    import callee  # so that other processes find its functions under this name

    sys.exit(callee.main())
