"""A client of the wire protocol that is independent of the library: written from csrc/wire/PROTOCOL.md, it can lie.

It has an identity file, the secret of the group or a TLS certificate, as a legitimate client does, and speaks over the
Unix socket of a worker or over TCP. It needs `pip install noiseprotocol`, and for TLS `pip install pyopenssl`.
"""

import base64
import hashlib
import hmac
import re
import socket
import struct
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from noise.connection import NoiseConnection

HELLO, WELCOME, REFUSAL, CONFIRM, READY = 1, 4, 5, 6, 7  # types of handshake messages
HAS_SECRET, IS_ENCRYPTED = 2, 4  # flags
MOST_RECORD_BYTES, END = 1 << 16, 1 << 31
HANDSHAKE_VERSION, PROTOCOL_VERSION = 9, 6


class Refused(Exception):
    """The worker has refused the client, or ended its connection."""


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

    def prove(self, handshake_hash: bytes) -> bytes:
        """Return the proof of the opener of a connection."""
        if not self.private_key:
            return b""
        signed = b"torchrpc handshake" + b"opener " + handshake_hash
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


class Tls:
    """TLS 1.3 over a connected socket, as the opener."""

    def __init__(self, connected: socket.socket, certificate: Path, key: Path, ca: Path, timeout_s: float) -> None:
        from OpenSSL import SSL

        context = SSL.Context(SSL.TLS_METHOD)
        context.set_min_proto_version(SSL.TLS1_3_VERSION)
        context.use_certificate_chain_file(str(certificate))
        context.use_privatekey_file(str(key))
        context.load_verify_locations(str(ca))
        context.set_verify(SSL.VERIFY_PEER)
        self._ssl = SSL
        self._socket = connected
        self.settimeout(timeout_s)
        self._connection = SSL.Connection(context, connected)
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

    def __init__(self, chaining_key: bytes, below: Any) -> None:
        self._below = below
        self._keys = [self._key(chaining_key, side) for side in (b"opener", b"listener")]
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


class Client:
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
    ) -> None:
        parts = dict(part.split("=", 1) for part in address.removeprefix("native:").split(";"))
        self.socket = socket.socket(socket.AF_UNIX if over == "unix" else socket.AF_INET)
        self.socket.settimeout(timeout_s)
        host, _, port = parts["tcp"].rpartition(":")
        self.socket.connect("\0" + parts["unix"] if over == "unix" else (host, int(port)))
        self._over = over
        self._stream: Any = Tls(self.socket, timeout_s=timeout_s, **tls) if tls else self.socket
        self._binding = self._stream.binding if tls else b""
        self._encrypts = over == "tcp" and encrypts and not tls
        self._shake_hands(int(parts["id"], 16), identity, name)
        if tls and over == "unix":
            self._stream = self.socket  # TLS ends after READY
            self.settimeout(timeout_s)

    def _shake_hands(self, listener: int, identity: Identity, name: str) -> None:
        noise = NoiseConnection.from_name(b"Noise_NNpsk0_25519_ChaChaPoly_SHA256")
        noise.set_as_initiator()
        psk = hmac.new(identity.secret, b"torchrpc: the key of connections", hashlib.sha256).digest()
        noise.set_psks(psk)
        flags = HAS_SECRET | (IS_ENCRYPTED if self._encrypts else 0)
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
        noise.decrypt(self._read_message(READY))
        if self._encrypts:
            self._stream = Records(symmetric.ck, self._stream)

    @staticmethod
    def _message(kind: int, rest: bytes) -> bytes:
        return b"torchrpc" + struct.pack("<HHHH", HANDSHAKE_VERSION, kind, len(rest), 0) + rest

    def _read_message(self, expected: int) -> bytes:
        head = self.read(16)
        kind, size = struct.unpack("<HH", head[10:14])
        rest = self.read(size)
        if kind != expected:
            raise Refused(rest[2:].decode(errors="replace"))
        return rest[2:]

    def read(self, size: int) -> bytes:
        return read_from(self._stream, size)

    def send(self, data: bytes) -> None:
        try:
            self._stream.sendall(data)
        except OSError as error:
            raise Refused(str(error)) from None

    def receive(self) -> tuple[int, int, bytes]:
        """Return kind, call id and the head of the next frame, whose segments are skipped."""
        head_size, segments, flags = struct.unpack("<QII", self.read(16))
        sizes = struct.unpack(f"<{segments}Q", self.read(8 * segments))
        if flags & 1:
            self.read(8 * segments)
        head = self.read(head_size)
        for size in sizes:
            self.read(size)
        kind, _, _, call = struct.unpack_from("<HHIQ", head)
        return kind, call, head

    def settimeout(self, timeout_s: float) -> None:
        self._stream.settimeout(timeout_s)

    def close(self) -> None:
        self._stream.close()


def address_in(stored: bytes) -> str:
    """Return the address in a worker's record in the store."""
    found = re.search(rb"native:id=[^\0]*?unix=[-\w.]+", stored)
    if not found:
        raise ValueError("the record has no address of a Unix socket")
    return found[0].decode()
