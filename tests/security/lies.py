"""Lies of a client of a group with identities, a secret alone, or TLS: it says what is not true, in many variations.

    pip install noiseprotocol pyopenssl
    python tests/security               # 20,000 lies: against groups of each kind that grow, and against fixed ones
    python tests/security --lies 10000000 --seed 7 --groups identities

The client speaks over Unix sockets and over TCP.

Each lie is a legitimate sequence of frames with one thing that is wrong: the name, the id, the incarnation, the rank,
the role, a count, a length, the order, the kind, or a value. Meanwhile an honest worker makes calls. Afterwards no name
or id may have changed hands, no honest call may have failed, the latency of honest calls (99th percentile) may be at
most ten times what it was, and the victim's memory and descriptors must be back. Prints a table by kind of lie; exits
with 1 if one of these does not hold.
"""

import argparse
import collections
import contextlib
import datetime
import gc
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from wire import Client, Identity, Refused, address_in, frame, hello, record, short, string

import torchrpc
import torchrpc.rpc as rpc
from torchrpc.testing import free_port, start_process

VICTIM, LIAR = "worker1", "client-900"
MEMBERS = ("worker0", VICTIM)
LIAR_RANK = 2  # in a group of a fixed size to which it belongs
SECRET = "the secret of the group that is lied to"
LATENCY_FACTOR, LEAST_S = 10, 0.05  # what honest calls may take beside the lies, compared with before; at least this
MORE_MEMORY, MORE_DESCRIPTORS = 64 << 20, 8
NUMBERS = [0, 1, 2, 7, 63, 255, 256, 65535, 2**20 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
KINDS = [
    *range(10),
    *range(16, 20),
    *range(32, 36),
    *range(48, 55),
    *range(64, 70),
    *range(80, 90),
    96,
    *range(104, 108),
]
GROUPS = {"identities": "identities", "secret": "a secret alone", "tls": "TLS certificates"}
ONE_WAY = {1, 4, 5, 6, 7, 8}

RREF_RESULT, REPEATABLE = 5, 9  # headers
NAME = "the honest worker's object"

Frames = list[bytes]


# --- the group -------------------------------------------------------------------------------------------------------
def make_identities(folder: str, members: Sequence[str] = MEMBERS, clients: Sequence[str] = (LIAR,)) -> None:
    keygen = [sys.executable, "-m", "torchrpc", "keygen", f"{folder}/group.key", "--member", *members]
    if clients:
        keygen += ["--client", *clients]
    subprocess.run(keygen, check=True, stdout=subprocess.DEVNULL, cwd=folder)


def make_certificates(folder: str, members: Sequence[str] = MEMBERS, clients: Sequence[str] = (LIAR,)) -> None:
    """Write ca.pem, and a certificate and a key for each worker."""
    now = datetime.datetime.now(datetime.timezone.utc)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])

    def sign(subject: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType) -> bytes:
        builder = x509.CertificateBuilder().issuer_name(ca_name).subject_name(subject).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=30)).add_extension(extension, critical=True)
        return builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    Path(folder, "ca.pem").write_bytes(sign(ca_name, ca_key, x509.BasicConstraints(ca=True, path_length=None)))
    for name in (*members, *clients):
        key = ec.generate_private_key(ec.SECP256R1())
        attribute = (NameOID.ORGANIZATIONAL_UNIT_NAME, "client") if name in clients else (NameOID.COMMON_NAME, name)
        subject = x509.Name([x509.NameAttribute(*attribute)])
        certificate = sign(subject, key, x509.SubjectAlternativeName([x509.DNSName(name)]))
        files = tls_files(folder, name)
        files["certificate"].write_bytes(certificate)
        pkcs8 = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        files["key"].write_bytes(key.private_bytes(*pkcs8))
        files["key"].chmod(0o600)


def tls_files(folder: str, name: str) -> dict[str, Path]:
    return {
        "certificate": Path(folder, f"{name}.pem"),
        "key": Path(folder, f"{name}.key"),
        "ca": Path(folder, "ca.pem"),
    }


def options_of(kind: str, folder: str, name: str) -> dict[str, Any]:
    """Return the options of a worker by which it and the others trust each other."""
    if kind == "identities":
        return {"identity": f"{folder}/{name}.identity"}
    return {"secret": SECRET} | ({"tls": rpc.TlsOptions(**tls_files(folder, name))} if kind == "tls" else {})


def join(kind: str, rank: int, port: int, world_size: int | None, folder: str) -> None:
    name = LIAR if rank == LIAR_RANK else f"worker{rank}"
    more = options_of(kind, folder, name)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", num_worker_threads=4, **more)
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)


def die_after_joining(*arguments: Any) -> None:
    join(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)


def serve(kind: str, port: int, world_size: int | None, folder: str, log: str) -> None:
    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)  # a warning for each refused connection
    join(kind, 1, port, world_size, folder)
    while any(worker.name == "worker0" for worker in rpc.get_worker_infos()):
        time.sleep(0.1)  # a worker leaves a group that grows without waiting for others
        if world_size:
            break
    rpc.shutdown()


def state() -> tuple[int, list[tuple[int, str]], int, int]:
    """Run on the victim: its process, the workers that it knows, its resident memory and its open descriptors."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    workers = sorted((worker.id, worker.name) for worker in rpc.get_worker_infos())
    return os.getpid(), workers, pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))


class HonestCaller:
    """Makes calls to a worker in a thread, checks their results and measures them."""

    def __init__(self, worker: str) -> None:
        self.seconds: list[float] = []
        self.errors: list[str] = []
        self._worker = worker
        self._is_over = False
        self._thread = threading.Thread(target=self._call)

    def _call(self) -> None:
        for number in range(10**9):
            if self._is_over:
                return
            begin = time.monotonic()
            try:
                value = rpc.rpc_sync(self._worker, torch.add, (torch.full((4,), number % 1000), 1)).tolist()
                if value != [number % 1000 + 1] * 4:
                    self.errors.append(f"an honest call returned {value}, not {[number % 1000 + 1] * 4}")
            except Exception as error:
                self.errors.append(f"an honest call failed: {error}")
            self.seconds.append(time.monotonic() - begin)
            time.sleep(0.001)  # one caller does not fill the worker

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over = True
        self._thread.join()

    def __enter__(self) -> "HonestCaller":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def slowest_s(self) -> float:
        """The 99th percentile of the latency."""
        return statistics.quantiles(self.seconds, n=100)[-1]


# --- lies ------------------------------------------------------------------------------------------------------------
class Liar:
    """Makes sequences of frames, each with one lie. All that is random comes from one seed."""

    def __init__(self, seed: int, rank: int) -> None:
        self.random = random.Random(seed)
        self.rank, self.name, self.incarnation = rank, LIAR, time.time_ns()
        self.lies: dict[str, Callable[[], Frames]] = {
            "name of a living worker": lambda: [hello(self.rank, self.living()[1], self.incarnation), *self.calls()],
            "id of a living worker": lambda: [hello(self.living()[0], self.name, self.number()), *self.calls()],
            "name and id of a living worker": lambda: [hello(*self.living(), self.number()), *self.calls()],
            "id that nobody has": lambda: [hello(self.rank_number(), self.name, self.number()), *self.calls()],
            "incarnation": lambda: [hello(self.rank, self.name, self.wrong_incarnation()), *self.calls()],
            "version": lambda: [hello(self.rank, self.name, self.incarnation, self.number() % 2**32), *self.calls()],
            "another worker has joined": lambda: [self.greeting(), self.joined(*self.living())],
            "nobody has joined": lambda: [self.greeting(), self.joined(self.rank_number(), self.any_name())],
            "role": lambda: [self.greeting(), self.joined(self.rank, self.name)],
            "count": lambda: [self.greeting(), self.with_field("headers", "tensors", "segments")],
            "length": lambda: [self.greeting(), self.with_field("payload_size", "head_size", "stream_segments")],
            "length of a string": lambda: [self.greeting(), self.call(string(b"aten::add")[:4] + self.bytes(24))],
            "order": self.out_of_order,
            "kind": lambda: [self.greeting(), *(self.request(self.random.choice(KINDS)) for _ in range(4))],
            "unknown kind": lambda: [self.greeting(), self.request(self.random.randrange(2**16))],
            "call id": lambda: [self.greeting(), *self.answers()],
            "RRef of another worker": lambda: [self.greeting(), *(self.about_rref() for _ in range(4))],
            "named object of another worker": lambda: [self.greeting(), *(self.about_name() for _ in range(4))],
            "call of another worker": lambda: [self.greeting(), *(self.about_call() for _ in range(4))],
            "value": lambda: [self.greeting(), *(self.call(self.add(self.value())) for _ in range(4))],
            "noise": lambda: [self.greeting(), self.bytes(64)],
        }

    def number(self) -> int:
        return self.random.choice([*NUMBERS, self.incarnation, self.incarnation + 1, self.random.randrange(2**64)])

    def rank_number(self) -> int:
        ranks = [-(2**31), -2, -1, 2, 3, 7, 64, 2**20, 2**31 - 1, self.random.randrange(2**31)]
        return self.random.choice([rank for rank in ranks if rank != self.rank])

    def wrong_incarnation(self) -> int:
        """Return a smaller one where the group keeps the largest, because it would refuse this liar from then on."""
        return self.number() % (self.incarnation if self.rank == LIAR_RANK else 2**64)

    def living(self) -> tuple[int, str]:
        return self.random.choice([(0, "worker0"), (1, VICTIM)])

    def any_name(self) -> str:
        return self.random.choice([self.name, "worker0", VICTIM, "worker2", "", "x" * 4096, "\x1b[2J", "a\nb"])

    def bytes(self, most: int) -> bytes:
        return self.random.randbytes(self.random.randint(1, most))

    def greeting(self) -> bytes:
        return hello(self.rank, self.name, self.incarnation)

    def call_id(self) -> int:
        return self.random.choice([1, 2, self.number()])

    def add(self, value: bytes) -> bytes:
        return (
            string(b"aten::add")
            + string(b"Scalar")
            + struct.pack("<I", 3)
            + value
            + b"\3"
            + bytes(8)
            + b"\3\1"
            + bytes(7)
        )

    def call(self, payload: bytes) -> bytes:
        return frame(16, self.call_id(), payload)

    def calls(self) -> Frames:
        """What a worker that takes another one's place would send."""
        honest = b"\3" + struct.pack("<q", 5)
        return [self.call(self.add(honest)), self.joined(*self.living()), frame(7), self.answers()[0]]

    def joined(self, rank: int, name: str) -> bytes:
        address = self.random.choice(["", "native:id=1;tcp=127.0.0.1:9", "native:id=1;unix=nobody", "x" * 300])
        world_size = self.random.choice([0, 2, 3, -1, 2**31 - 1])
        payload = record(rank, name, self.number(), address, world_size, self.random.random() < 0.7)
        return frame(53, self.call_id(), payload)

    def with_field(self, *names: str) -> bytes:
        name, value = self.random.choice(names), self.number()
        limits = {
            "payload_size": 64,
            "head_size": 64,
            "headers": 32,
            "tensors": 32,
            "segments": 32,
            "stream_segments": 32,
        }
        return frame(16, self.call_id(), self.add(self.value()), **{name: value % 2 ** limits[name]})

    def request(self, kind: int) -> bytes:
        return frame(kind, 0 if kind in ONE_WAY else self.call_id(), self.bytes(80))

    def answers(self) -> Frames:
        return [frame(self.random.choice([2, 3, 6, 8]), self.call_id(), self.bytes(16)) for _ in range(3)]

    def rref_id(self) -> bytes:
        maker = self.random.choice([self.living()[0], self.rank])
        return struct.pack("<iQQ", maker, self.random.randrange(8), self.number())

    def about_rref(self) -> bytes:
        """A fetch, a registration, an acceptance, a deletion or a remote call with ids of others."""
        kind = self.random.choice([32, 48, 49, 50, 51, 52])
        numbers = [struct.pack("<Q", self.number()) for _ in range(2)]
        if kind == 32:
            result = self.rref_id() + self.rref_id() + numbers[0]
            header = struct.pack("<H", RREF_RESULT) + string(result)
            return frame(kind, self.call_id(), self.add(b"\0"), headers=1, header_bytes=header)
        if kind == 51:
            return frame(kind, self.call_id(), self.rref_id())
        return frame(kind, self.call_id(), self.rref_id() + self.rref_id() + b"".join(numbers[kind == 52 :]))

    def about_name(self) -> bytes:
        name = self.random.choice([NAME, self.any_name()]).encode()
        return frame(self.random.choice([88, 89]), self.call_id(), short(name) + struct.pack("<Q", self.number()))

    def about_call(self) -> bytes:
        """A cancellation, a report that calls have started, or a call with the key and the number of another one."""
        kind, number = self.random.choice([6, 8, 16]), struct.pack("<Q", self.number())
        if kind != 16:
            return frame(kind, 0, number * self.random.choice([1, 2]))
        repeatable = string(self.random.choice([b"", b"key"])) + number * 2 + bytes(16) + struct.pack("<I", 1)
        header = struct.pack("<H", REPEATABLE) + string(repeatable)
        return frame(kind, self.call_id(), self.add(b"\0"), headers=1, header_bytes=header)

    def out_of_order(self) -> Frames:
        frames = [self.greeting(), self.call(self.add(b"\0")), frame(4), self.joined(self.rank, self.name), frame(7)]
        frames += [hello(*self.living(), self.number())]
        self.random.shuffle(frames)
        return frames

    def value(self) -> bytes:
        """A value of the plain form, with a wrong tag, count or index somewhere."""
        tag = self.random.choice([*range(24), self.random.randrange(256)])
        count = struct.pack("<I", self.number() % 2**32)
        parts = [b"", count, struct.pack("<Q", self.number()), self.bytes(16)]
        return bytes([tag]) + self.random.choice(parts) + self.random.choice(parts)

    def sequences(self, count: int) -> Iterator[tuple[str, Frames]]:
        names = list(self.lies)
        for _ in range(count):
            name = self.random.choice(names)
            yield name, self.lies[name]()


def tell(address: str, credentials: dict[str, Any], over: str, frames: Frames) -> str:
    """Send the frames over a new connection; return what the victim did."""
    try:
        client = Client(address, name=LIAR, over=over, **credentials)
    except (Refused, OSError):
        return "no connection"
    kinds = set()
    try:
        client.send(b"".join(frames) + frame(4))  # PING: the answer to it shows that the victim has read the frames
        client.settimeout(0.2)
        while 5 not in kinds:
            kinds.add(client.receive()[0])
    except Refused as refused:
        return "closed" if "timed out" not in str(refused) else "waits for more"
    finally:
        client.close()
    return "error" if 3 in kinds else "answer" if 2 in kinds else "ignored"


# --- the run ---------------------------------------------------------------------------------------------------------
def settled(before: tuple, limit_s: float = 20) -> tuple:
    """Return the victim's state when memory and descriptors are back, or after the limit."""
    end = time.monotonic() + limit_s
    while True:
        after = rpc.rpc_sync(VICTIM, state)
        is_back = after[2] <= before[2] + MORE_MEMORY and after[3] <= before[3] + MORE_DESCRIPTORS
        if is_back or time.monotonic() > end:
            return after
        time.sleep(0.5)  # between two looks at a condition


def attack(
    kind: str, world_size: int | None, lies: int, seed: int, folder: str, log: str
) -> tuple[list[str], dict[str, collections.Counter]]:
    """Attack a new group; return what did not hold, and the victim's reactions by kind of lie."""
    port = free_port()
    victim = start_process(serve, kind, port, world_size, folder, log)
    has_liar = world_size is not None and world_size > LIAR_RANK
    if has_liar:
        start_process(die_after_joining, kind, LIAR_RANK, port, world_size, folder)
    join(kind, 0, port, world_size, folder)
    text = Path(folder, f"{LIAR}.identity").read_text() if kind == "identities" else ""
    credentials = {"identity": Identity(text, SECRET.encode()), "tls": None}
    if kind == "tls":
        credentials["tls"] = tls_files(folder, LIAR)
    store = dist.PrefixStore("rpc_prefix_0", dist.TCPStore("127.0.0.1", port, is_master=False))
    while not rpc_has_victim():
        time.sleep(0.05)  # between two looks at a condition
    address = address_in(bytes(store.get("worker/1")))
    held = rpc.remote(VICTIM, torch.ones, args=([3],))
    torchrpc.register(NAME, held)
    liar = Liar(seed, LIAR_RANK if has_liar else 900)
    for _, frames in liar.sequences(200):  # what a first attack leaves is no growth: code, caches, log lines
        tell(address, credentials, liar.random.choice(["unix", "tcp"]), frames)
    with HonestCaller(VICTIM) as quiet:
        time.sleep(2)  # measures
    before = rpc.rpc_sync(VICTIM, state)
    reactions: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    with HonestCaller(VICTIM) as beside:
        for name, frames in liar.sequences(lies):
            reactions[name][tell(address, credentials, liar.random.choice(["unix", "tcp"]), frames)] += 1
    after = settled(before)
    broken = [f"an honest call failed: {error}" for error in beside.errors[:3]]
    if after[0] != victim.pid:
        broken.append("calls to the victim go to another process")
    if after[1] != before[1] or after[1] != sorted((each.id, each.name) for each in rpc.get_worker_infos()):
        broken.append(f"the victim knows other workers: {after[1]}, before {before[1]}")
    if not all(rref.to_here().tolist() == [1, 1, 1] for rref in (held, torchrpc.lookup(NAME))):
        broken.append("an RRef has another value")
    if after[2] > before[2] + MORE_MEMORY:
        broken.append(f"memory grew from {before[2] >> 20} to {after[2] >> 20} MiB")
    if after[3] > before[3] + MORE_DESCRIPTORS:
        broken.append(f"open descriptors grew from {before[3]} to {after[3]}")
    limit_s = max(LATENCY_FACTOR * quiet.slowest_s, LEAST_S)
    if beside.slowest_s > limit_s:
        broken.append(f"honest calls took {beside.slowest_s:.3f} s (p99), {quiet.slowest_s:.4f} s before")
    with contextlib.suppress(rpc.WorkerLostError):  # the liar's own process
        rpc.shutdown()
    victim.join(30)
    print(
        f"p99 of honest calls: {quiet.slowest_s * 1e3:.2f} ms before, {beside.slowest_s * 1e3:.2f} ms beside the lies"
    )
    return broken, reactions


def rpc_has_victim() -> bool:
    return any(worker.name == VICTIM for worker in rpc.get_worker_infos())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lies", type=int, default=20_000, help="in all; default: 20,000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), help="default: of all kinds")
    parser.add_argument("--log", default=os.devnull, help="a file for the log lines of the victim")
    arguments = parser.parse_args()
    is_broken = False
    folder = tempfile.TemporaryDirectory()
    if "identities" in arguments.groups:
        make_identities(folder.name)
    if "tls" in arguments.groups:
        make_certificates(folder.name)
    kinds = [("grows", None), ("is fixed", 2), ("is fixed and has lost the liar's process", LIAR_RANK + 1)]
    # Where names are not proved, a worker of a fixed group may announce others.
    groups = [(kind, *each) for kind in arguments.groups for each in (kinds[:2] if kind == "secret" else kinds)]
    for kind, title, world_size in groups:
        begin = time.monotonic()
        print(f"\na group with {GROUPS[kind]} that {title}, seed {arguments.seed}:", flush=True)
        count = arguments.lies // len(groups)
        broken, reactions = attack(kind, world_size, count, arguments.seed, folder.name, arguments.log)
        outcomes = ["closed", "error", "answer", "ignored", "waits for more", "no connection"]
        print("| lie | sent | " + " | ".join(outcomes) + " |\n|-|-|" + "-|" * len(outcomes))
        for name, counts in reactions.items():
            print(f"| {name} | {counts.total()} | " + " | ".join(str(counts[each] or "") for each in outcomes) + " |")
        print(f"{time.monotonic() - begin:.0f} s; " + ("all holds" if not broken else "BROKEN: " + "; ".join(broken)))
        is_broken = is_broken or bool(broken)
    return 1 if is_broken else 0
