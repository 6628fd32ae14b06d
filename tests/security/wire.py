"""Both sides of the wire protocol, independent of the library: written from csrc/wire/PROTOCOL.md, they can lie.

They have an identity file, the secret of the group or a TLS certificate, as a legitimate worker does, and speak over
Unix sockets, with or without rings in shared memory, or over TCP. They need `pip install noiseprotocol`, and for TLS
`pip install pyopenssl`. `Client` opens a connection, `Accepted` is the side that listens.
"""

import base64
import contextlib
import ctypes
import hashlib
import hmac
import mmap
import os
import platform
import re
import select
import socket
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from noise.connection import Keypair, NoiseConnection

HELLO, WELCOME, REFUSAL, CONFIRM, READY = 1, 4, 5, 6, 7  # types of handshake messages
SHARES_MEMORY, HAS_SECRET, IS_ENCRYPTED = 1, 2, 4  # flags
MOST_RECORD_BYTES, END = 1 << 16, 1 << 31
HANDSHAKE_VERSION, PROTOCOL_VERSION = 9, 6


IN_STREAM = 2**64 - 1  # the slab offset of a segment that is in no slab


class Refused(Exception):
    """The worker has refused this side, or ended its connection."""


def short(data: bytes) -> bytes:
    return struct.pack("<H", len(data)) + data


def string(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def record(rank: int, name: str, incarnation: int, address: str, world_size: int, is_member: bool) -> bytes:
    """Return a worker's record, as in the store and in MEMBER_JOINED."""
    parts = struct.pack("<i", rank) + string(name.encode()) + string(address.encode())
    return parts + struct.pack("<iQ", world_size, incarnation) + string(b"") + string(b"") + bytes([is_member])


class Identity:
    """The parts of an identity file; or of a secret alone, which proves no name."""

    def __init__(self, text: str = "", secret: bytes = b"") -> None:
        lines = [line.split(": ", 1) for line in text.splitlines() if line and not line.startswith("#")]
        parts = {name: base64.b64decode(value) for name, value in lines}
        self.secret = parts.get("secret", secret)
        self.certificate = parts.get("certificate", b"")
        self.private_key = parts.get("private key", b"")[:32]

    def prove(self, handshake_hash: bytes, side: bytes = b"opener") -> bytes:
        """Return the proof of one side of a connection."""
        if not self.private_key:
            return b""
        signed = b"torchrpc handshake" + side + b" " + handshake_hash
        return Ed25519PrivateKey.from_private_bytes(self.private_key).sign(signed) + self.certificate


def frame(kind: int, call: int = 0, payload: bytes = b"", **lies: int) -> bytes:
    """Return a frame without tensors as bytes of the stream. `lies` replace fields that the content determines."""
    headers = lies.get("header_bytes", b"")
    head = struct.pack(
        "<HHIQIIQ",
        kind,
        lies.get("flags", 0),
        lies.get("headers", 0),
        call,
        lies.get("tensors", 0),
        lies.get("segments", 0),
        lies.get("payload_size", len(payload)),
    )
    head += headers + payload
    return struct.pack("<QII", lies.get("head_size", len(head)), lies.get("stream_segments", 0), 0) + head


def hello(rank: int, name: str, incarnation: int, version: int = PROTOCOL_VERSION) -> bytes:
    return frame(1, 0, struct.pack("<Ii", version, rank) + string(name.encode()) + struct.pack("<Q", incarnation))


class Seal:
    """Seals what a worker publishes in the store of a group that has a secret."""

    def __init__(self, secret: bytes) -> None:
        self._key = hmac.new(secret, b"torchrpc store", hashlib.sha256).digest()
        self._group = b""

    def bind_to(self, records: list[bytes]) -> None:
        """Say which workers the group has: their records, in the order of their ranks."""
        self._group = hmac.new(self._key, b"".join(records), hashlib.sha256).digest()

    def seal(self, key: str, value: bytes) -> bytes:
        covered = string(key.encode()) + string(self._group) + string(value)
        return b"sealed:" + hmac.new(self._key, covered, hashlib.sha256).digest() + value

    @staticmethod
    def content(stored: bytes) -> bytes:
        return stored[len(b"sealed:") + 32 :]


class Tls:
    """TLS 1.3 over a connected socket."""

    def __init__(
        self,
        connected: socket.socket,
        certificate: Path,
        key: Path,
        ca: Path,
        timeout_s: float,
        listens: bool = False,
    ) -> None:
        from OpenSSL import SSL

        context = SSL.Context(SSL.TLS_METHOD)
        context.set_min_proto_version(SSL.TLS1_3_VERSION)
        context.use_certificate_chain_file(str(certificate))
        context.use_privatekey_file(str(key))
        context.load_verify_locations(str(ca))
        context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT)
        self._ssl = SSL
        self._socket = connected
        self.settimeout(timeout_s)
        self._connection = SSL.Connection(context, connected)
        if listens:
            self._connection.set_accept_state()
        else:
            self._connection.set_connect_state()
        try:
            self._connection.do_handshake()
        except SSL.Error as error:
            raise Refused(repr(error)) from None
        self.binding = self._connection.export_keying_material(b"EXPORTER-torchrpc", 32, None)

    def settimeout(self, timeout_s: float) -> None:
        self._socket.settimeout(None)  # OpenSSL reads from the descriptor itself
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def recv(self, size: int) -> bytes:
        try:
            return self._connection.recv(size)
        except self._ssl.WantReadError:
            raise TimeoutError("timed out") from None
        except self._ssl.ZeroReturnError:
            return b""
        except self._ssl.Error as error:
            raise OSError(repr(error)) from None

    def sendall(self, data: bytes) -> None:
        try:
            self._connection.sendall(data)
        except self._ssl.Error as error:
            raise OSError(repr(error)) from None

    def close(self) -> None:
        self._socket.close()


class Records:
    """The encrypted records of a connection over TCP, with ChaCha20-Poly1305."""

    def __init__(self, chaining_key: bytes, below: Any, listens: bool = False) -> None:
        self._below = below
        sides = (b"listener", b"opener") if listens else (b"opener", b"listener")
        self._keys = [self._key(chaining_key, side) for side in sides]  # of the sent and of the received bytes
        self._numbers = [0, 0]  # of the next record in each direction
        self._opened = b""

    @staticmethod
    def _key(chaining_key: bytes, side: bytes) -> ChaCha20Poly1305:
        label = b"torchrpc: ChaCha20-Poly1305 from the " + side
        return ChaCha20Poly1305(hmac.new(chaining_key, label, hashlib.sha256).digest())

    def _next(self, direction: int) -> tuple[ChaCha20Poly1305, bytes]:
        nonce = bytes(4) + struct.pack("<Q", self._numbers[direction])
        self._numbers[direction] += 1  # a connection ends before 65,536 records, where the key would change
        return self._keys[direction], nonce

    def sendall(self, data: bytes) -> None:
        sealed = b""
        for begin in range(0, len(data), MOST_RECORD_BYTES):
            piece = data[begin : begin + MOST_RECORD_BYTES]
            head = struct.pack("<I", len(piece))
            key, nonce = self._next(0)
            sealed += head + key.encrypt(nonce, piece, head)
        self._below.sendall(sealed)

    def send_record(self, piece: bytes, head: bytes, damage: int = 0) -> None:
        """Send a record whose head need not be true; `damage`: bits that are changed in its last byte."""
        key, nonce = self._next(0)
        sealed = key.encrypt(nonce, piece, head)
        self._below.sendall(head + sealed[:-1] + bytes([sealed[-1] ^ damage]))

    def recv(self, size: int) -> bytes:
        if not self._opened:
            head = read_from(self._below, 4)
            count = struct.unpack("<I", head)[0]
            if count == END:
                return b""
            key, nonce = self._next(1)
            self._opened = key.decrypt(nonce, read_from(self._below, count + 16), head)
        data, self._opened = self._opened[:size], self._opened[size:]
        return data

    def settimeout(self, timeout_s: float) -> None:
        self._below.settimeout(timeout_s)

    def close(self) -> None:
        self._below.close()


class Rings:
    """The rings of a connection in shared memory, and its slabs. `listens`: whose outgoing direction is the second."""

    CONTROL, RING, SLABS, UNIT = 4096, 8 << 20, 128 << 20, 64 << 10
    BYTES = 2 * (CONTROL + RING + SLABS)
    WRITTEN, BEGIN, READ, READER_WAITS, WRITER_WAITS = 0, 8, 128, 256, 384  # in the control of a direction
    RETURN_COUNT, RETURNED = 640, 648
    FUTEX, FUTEX_WAKE = 98 if platform.machine() == "aarch64" else 202, 1  # numbers of Linux

    def __init__(self, memory: int, connected: socket.socket, listens: bool) -> None:
        self.memory = mmap.mmap(memory, self.BYTES)
        os.close(memory)
        self._socket = connected
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.out, self.into = (1, 0) if listens else (0, 1)
        self._timeout_s = 10.0

    @staticmethod
    def make() -> int:
        """Return a descriptor of such memory, sealed against growing and shrinking."""
        memory = os.memfd_create("rings", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(memory, Rings.BYTES)
        Rings.seal(memory)
        return memory

    @staticmethod
    def seal(memory: int) -> None:
        import fcntl

        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)

    def number(self, direction: int, field: int) -> ctypes.c_uint64:
        return ctypes.c_uint64.from_address(self._base + direction * self.CONTROL + field)

    def flag(self, direction: int, field: int) -> ctypes.c_uint32:
        return ctypes.c_uint32.from_address(self._base + direction * self.CONTROL + field)

    def ring_at(self, direction: int) -> int:
        return 2 * self.CONTROL + direction * self.RING

    def slabs_at(self, direction: int) -> int:
        return 2 * (self.CONTROL + self.RING) + direction * self.SLABS

    def wake(self, direction: int, field: int) -> None:
        flag = self.flag(direction, field)
        how, flag.value = flag.value, 0
        if how == 1:
            with contextlib.suppress(BlockingIOError):  # the peer has unread wake-ups
                self._socket.send(b"\0", socket.MSG_DONTWAIT)
        elif how == 2:
            ctypes.CDLL(None).syscall(self.FUTEX, ctypes.byref(flag), self.FUTEX_WAKE, 1, None, None, 0)

    def _wait(self, is_ready: Callable[[], bool], direction: int, field: int) -> None:
        end = time.monotonic() + self._timeout_s
        while not is_ready():
            self.flag(direction, field).value = 1
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            # Not longer, because this side sets its flag without the order that the protocol requires.
            is_woken = not is_ready() and select.select([self._socket], [], [], min(left_s, 0.02))[0]
            if is_woken and not self._socket.recv(64) and not is_ready():
                raise ConnectionResetError("the other side has closed the connection")

    def sendall(self, data: bytes) -> None:
        written, read = self.number(self.out, self.WRITTEN), self.number(self.out, self.READ)
        while data:
            self._wait(lambda: written.value - read.value < self.RING, self.out, self.WRITER_WAITS)
            if written.value == read.value:
                self.number(self.out, self.BEGIN).value = written.value
            at = (written.value - self.number(self.out, self.BEGIN).value) % self.RING
            piece = data[: min(self.RING - (written.value - read.value), self.RING - at)]
            begin = self.ring_at(self.out) + at
            self.memory[begin : begin + len(piece)] = piece
            written.value += len(piece)
            data = data[len(piece) :]
            self.wake(self.out, self.READER_WAITS)

    def recv(self, size: int) -> bytes:
        written, read = self.number(self.into, self.WRITTEN), self.number(self.into, self.READ)
        self._wait(lambda: written.value != read.value, self.into, self.READER_WAITS)
        at = (read.value - self.number(self.into, self.BEGIN).value) % self.RING
        count = min(size, written.value - read.value, self.RING - at)
        begin = self.ring_at(self.into) + at
        data = self.memory[begin : begin + count]
        read.value += count
        self.wake(self.into, self.WRITER_WAITS)
        return data

    def settimeout(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def close(self) -> None:
        self._socket.close()


def read_from(stream: Any, size: int) -> bytes:
    data = b""
    while len(data) < size:
        try:
            more = stream.recv(size - len(data))
        except OSError as error:
            raise Refused(str(error)) from None
        if not more:
            raise Refused("the worker has closed the connection")
        data += more
    return data


class Connection:
    """One side of a connection. A subclass makes the handshake."""

    NOISE = b"Noise_NNpsk0_25519_ChaChaPoly_SHA256"

    def __init__(self, connected: socket.socket, over: str) -> None:
        self.socket = connected
        self._over = over
        self._stream: Any = connected

    @staticmethod
    def _key_of(identity: Identity) -> bytes:
        return hmac.new(identity.secret, b"torchrpc: the key of connections", hashlib.sha256).digest()

    @staticmethod
    def _message(kind: int, rest: bytes) -> bytes:
        return b"torchrpc" + struct.pack("<HHHH", HANDSHAKE_VERSION, kind, len(rest), 0) + rest

    def _read_message(self, expected: int) -> bytes:
        head = self.read(16)
        kind, size = struct.unpack("<HH", head[10:14])
        rest = self.read(size)
        if kind != expected:
            raise Refused(f"a message of type {kind}, not {expected}: {rest[2:].decode(errors='replace')}")
        return rest[2:]

    def read(self, size: int) -> bytes:
        return read_from(self._stream, size)

    def send(self, data: bytes) -> None:
        try:
            self._stream.sendall(data)
        except OSError as error:
            raise Refused(str(error)) from None

    @property
    def stream(self) -> Any:
        """What carries the frames: a socket, TLS, records or rings."""
        return self._stream

    def receive(self, on_begin: Callable[[int, int], None] | None = None) -> tuple[int, int, bytes]:
        """Return kind, call id and the head of the next frame, whose segments are skipped. `on_begin` gets kind and
        call id when the first bytes of the head have arrived.
        """
        head_size, segments, flags = struct.unpack("<QII", self.read(16))
        sizes = struct.unpack(f"<{segments}Q", self.read(8 * segments))
        offsets = struct.unpack(f"<{segments}Q", self.read(8 * segments)) if flags & 1 else (IN_STREAM,) * segments
        head = self.read(min(head_size, 32))
        kind, _, _, call = struct.unpack_from("<HHIQ", head)
        if on_begin:
            on_begin(kind, call)
        head += self.read(head_size - len(head))
        for size, offset in zip(sizes, offsets, strict=True):
            if offset == IN_STREAM:
                self.read(size)
        return kind, call, head

    def settimeout(self, timeout_s: float) -> None:
        self._stream.settimeout(timeout_s)

    def close(self) -> None:
        self._stream.close()


class Client(Connection):
    """A connection to a worker, after the handshake. `tls`: the paths certificate, key and ca."""

    def __init__(
        self,
        address: str,
        identity: Identity,
        name: str,
        timeout_s: float = 10,
        over: str = "unix",
        tls: dict[str, Path] | None = None,
        encrypts: bool = True,
        shares_memory: bool = False,
    ) -> None:
        parts = dict(part.split("=", 1) for part in address.removeprefix("native:").split(";"))
        super().__init__(socket.socket(socket.AF_UNIX if over == "unix" else socket.AF_INET), over)
        self.socket.settimeout(timeout_s)
        host, _, port = parts["tcp"].rpartition(":")
        self.socket.connect("\0" + parts["unix"] if over == "unix" else (host, int(port)))
        self._stream = Tls(self.socket, timeout_s=timeout_s, **tls) if tls else self.socket
        self._binding = self._stream.binding if tls else b""
        self._encrypts = over == "tcp" and encrypts and not tls
        self._shares_memory = shares_memory and over == "unix" and not tls
        self._timeout_s = timeout_s
        self._shake_hands(int(parts["id"], 16), identity, name)
        if tls and over == "unix":
            self._stream = self.socket  # TLS ends after READY
            self.settimeout(timeout_s)

    def _shake_hands(self, listener: int, identity: Identity, name: str) -> None:
        noise = NoiseConnection.from_name(self.NOISE)
        noise.set_as_initiator()
        noise.set_psks(self._key_of(identity))
        flags = HAS_SECRET | (IS_ENCRYPTED if self._encrypts else 0) | (SHARES_MEMORY if self._shares_memory else 0)
        fixed = struct.pack("<QH", listener, flags) + short(b"")
        noise.set_prologue(self._message(HELLO, fixed + short(b"")) + self._over.encode() + self._binding)
        noise.start_handshake()
        symmetric = noise.noise_protocol.symmetric_state
        own = struct.pack("<H", 0) + short(name.encode()) + short(b"") + short(b"")
        self._stream.sendall(self._message(HELLO, fixed + short(bytes(noise.write_message(own)))))
        noise.read_message(self._read_message(WELCOME))
        proof = identity.prove(bytes(noise.get_handshake_hash()))
        proved = struct.pack("<H", 0) + short(b"") + short(b"") + short(proof)
        self._stream.sendall(self._message(CONFIRM, short(bytes(noise.encrypt(proved)))))
        memory = None
        if self._shares_memory:
            # The descriptor comes with the first byte of READY, which is left in the socket for the next read.
            ancillary = self.socket.recvmsg(1, socket.CMSG_SPACE(4), socket.MSG_PEEK)[1]
            memory = struct.unpack("i", ancillary[0][2][:4])[0] if ancillary else None
        noise.decrypt(self._read_message(READY))
        if memory is not None:
            self._stream = Rings(memory, self.socket, listens=False)
            self._stream.settimeout(self._timeout_s)
        if self._encrypts:
            self._stream = Records(symmetric.ck, self._stream)


class Accepted(Connection):
    """A connection that a worker has opened, after the handshake.

    Args:
        listener: the number of this listener, as in its address.
        encrypts: whether the group encrypts TCP.
        tls: the paths certificate, key and ca.
        shares_memory: whether to make rings for an opener over a Unix socket that offers to use them.
        twist: gets the name and the value of each part of the handshake, and returns what is sent instead.
    """

    def __init__(
        self,
        connected: socket.socket,
        listener: int,
        identity: Identity,
        name: str,
        over: str,
        timeout_s: float = 10,
        tls: dict[str, Path] | None = None,
        encrypts: bool = True,
        shares_memory: bool = True,
        twist: Callable[[str, Any], Any] = lambda part, value: value,
    ) -> None:
        super().__init__(connected, over)
        self.socket.settimeout(timeout_s)
        if tls:
            self._stream = Tls(connected, timeout_s=timeout_s, listens=True, **tls)
        self._encrypts = over == "tcp" and encrypts and not tls
        self._shares_memory = shares_memory and over == "unix" and not tls
        self._shake_hands(listener, identity, name, self._stream.binding if tls else b"", twist)
        if tls and over == "unix":
            self._stream = self.socket  # TLS ends after READY
        self.settimeout(timeout_s)

    def _shake_hands(self, listener: int, identity: Identity, name: str, binding: bytes, twist: Any) -> None:
        head = self.read(16)
        rest = self.read(struct.unpack("<H", head[12:14])[0])
        wanted, flags, group_size = struct.unpack_from("<QHH", rest)
        fixed, sealed = rest[: 12 + group_size], rest[14 + group_size :]
        if wanted != listener:
            raise Refused("another listener is wanted")
        noise = NoiseConnection.from_name(self.NOISE)
        noise.set_as_responder()
        noise.set_psks(self._key_of(identity))
        noise.set_keypair_from_private_bytes(Keypair.EPHEMERAL, os.urandom(32))
        noise.set_prologue(self._message(HELLO, fixed + short(b"")) + self._over.encode() + binding)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the key is set, because the proof covers it, but is used once
            noise.start_handshake()
        symmetric = noise.noise_protocol.symmetric_state
        opened = bytes(noise.read_message(sealed))
        self.peer = opened[4 : 4 + struct.unpack_from("<H", opened, 2)[0]].decode()
        public_key = noise.noise_protocol.keypairs["e"].public_bytes
        proof = twist("proof", identity.prove(hashlib.sha256(symmetric.h + public_key).digest(), b"listener"))
        chosen = twist("flags of WELCOME", IS_ENCRYPTED if self._encrypts else 0)
        own = struct.pack("<H", chosen) + short(twist("name", name).encode())
        own += short(twist("setting", b"")) + short(proof)
        welcome = bytes(noise.write_message(twist("payload of WELCOME", own)))
        self.send(twist("WELCOME", self._message(WELCOME, short(welcome))))
        noise.decrypt(self._read_message(CONFIRM))
        memory = None
        if self._shares_memory and flags & SHARES_MEMORY:
            memory = twist("memory", Rings.make())
        chosen = twist("flags of READY", 0 if memory is None else SHARES_MEMORY)
        ready = noise.encrypt(twist("payload of READY", struct.pack("<H", chosen) + 3 * short(b"")))
        message = twist("READY", self._message(READY, short(bytes(ready))))
        if memory is None:
            self.send(message)
        else:
            socket.send_fds(self.socket, [message], [memory])
            twist("READY is sent", memory)
            self._stream = Rings(memory, self.socket, listens=True)
        if self._encrypts:
            self._stream = Records(symmetric.ck, self._stream, listens=True)


def address_in(stored: bytes) -> str:
    """Return the address in a worker's record in the store."""
    found = re.search(rb"native:id=[^\0]*?unix=[-\w.]+", stored)
    if not found:
        raise ValueError("the record has no address of a Unix socket")
    return found[0].decode()
