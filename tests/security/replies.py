"""What a callee sends: a true reply to each kind of request, and lies. Written from csrc/wire/PROTOCOL.md.

Each lie is decided by a source of random numbers. The lies about the handshake, about records of encryption and about
shared memory need more than bytes of frames: they get the connection.
"""

import contextlib
import itertools
import os
import random
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wire import HANDSHAKE_VERSION, IN_STREAM, Connection, Records, Refused, Rings, hello, short, string

NUMBERS = [0, 1, 2, 7, 63, 255, 256, 65535, 2**20 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]

# Kinds of messages.
REPLY, ERROR, PING, PONG, STARTED, GOODBYE, CANCEL = 2, 3, 4, 5, 6, 7, 8
OPERATOR, FUNCTION = 16, 18
REMOTE_CALLS, FETCHES = {32, 33, 34, 35}, {48, 49}
FORK_REQUEST, CHILD_ACCEPT, USER_DELETE, NAME_FIND = 50, 51, 52, 54
MARK, GRADIENTS, ABORT, CLEANUP, HELD = 64, 65, 66, 67, 69
OPTIM_CREATE, OPTIM_STEP, INSPECT = 80, 81, 96
KINDS = [*range(1, 9), *range(16, 20), *range(32, 36), *range(48, 55), *range(64, 70), *range(80, 84), 88, 89, 96, 104]
BOOKKEEPING = {FORK_REQUEST, CHILD_ACCEPT, USER_DELETE, ABORT, CLEANUP, HELD}  # requests that are sent until answered

# Headers.
FORKS, CONTEXT, PROFILING, SHARED_STORAGES, ORIGIN, EXCEPTION_TYPE = 1, 2, 3, 7, 11, 15
HEADERS = range(17)

FLOAT, LONG, BYTE, BOOL, COMPLEX, QINT8 = 6, 4, 0, 11, 9, 12  # c10::ScalarType
REQUIRES_GRAD, CONJUGATE, NEGATIVE, STRIDES, SEGMENT, META, COALESCED = 1, 2, 4, 8, 16, 32, 64  # bits of a tensor
NO_WORKER, NO_NUMBER = -1, 0

# A log that does not escape these begins a line with the word, or commands a terminal.
FORGED_LINE = "FORGED"
NASTY = ["\x1b[2J\x1b[31m", f"\n{FORGED_LINE} line", "\r" + FORGED_LINE, "\x9b31m", "\0", "\u2028", "\u202e", "%s%n{}"]
NOT_UTF8 = b"\xff\xfe\xc0\x80\xed\xa0\x80"


# --- messages --------------------------------------------------------------------------------------------------------
@dataclass
class Part:
    """The bytes of a tensor that precede its data, and its data."""

    prefix: bytes
    data: bytes = b""
    in_segment: bool = False


Tensor = list[Part]


def strided(
    dtype: int,
    sizes: Sequence[int],
    data: bytes = b"",
    bits: int = 0,
    strides: Sequence[int] | None = None,
    in_segment: bool = False,
) -> Tensor:
    bits |= (STRIDES if strides is not None else 0) | (SEGMENT if in_segment else 0)
    numbers = [*sizes, *(strides or [])]
    prefix = bytes([1, dtype, bits & 255, len(sizes) & 255]) + struct.pack(f"<{len(numbers)}q", *numbers)
    return [Part(prefix, data, in_segment)]


def floats(*values: float) -> Tensor:
    return strided(FLOAT, [len(values)], struct.pack(f"<{len(values)}f", *values))


@dataclass
class Message:
    kind: int
    call: int
    payload: bytes = b""
    headers: list[tuple[int, bytes]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    flags: int = 0
    slab_offsets: list[int] | None = None

    def stream(self, **lies: Any) -> bytes:
        """Return the bytes of the stream. `lies` replace fields that the content determines."""
        segments = [part.data for tensor in self.tensors for part in tensor if part.in_segment]
        head = struct.pack(
            "<HHIQIIQ",
            lies.get("kind", self.kind),
            lies.get("flags", self.flags),
            lies.get("headers", len(self.headers)),
            lies.get("call", self.call),
            lies.get("tensors", len(self.tensors)),
            lies.get("segments", len(segments)),
            lies.get("payload_size", len(self.payload)),
        )
        head += b"".join(struct.pack("<H", number) + string(content) for number, content in self.headers)
        for part in itertools.chain(*self.tensors):
            head += part.prefix
            if part.data and not part.in_segment:
                head += bytes(-len(head) % 8) + part.data
        head += self.payload
        offsets = lies.get("slab_offsets", self.slab_offsets)
        sizes = lies.get("sizes", [len(segment) for segment in segments])
        sent = struct.pack(
            "<QII",
            lies.get("head_size", len(head)),
            lies.get("stream_segments", len(segments)),
            lies.get("stream_flags", 0 if offsets is None else 1),
        )
        sent += struct.pack(f"<{len(sizes)}Q", *sizes)
        if offsets is not None:
            sent += struct.pack(f"<{len(offsets)}Q", *offsets)
        in_stream = [
            segment for n, segment in enumerate(segments) if offsets is None or offsets[n : n + 1] == [IN_STREAM]
        ]
        return sent + head + b"".join(in_stream)


class Request:
    """A request that has arrived, and what is known of its head."""

    def __init__(self, kind: int, call: int, head: bytes) -> None:
        self.kind, self.call = kind, call
        _, _, headers, _, _, _, payload_size = struct.unpack_from("<HHIQIIQ", head)
        self.headers: dict[int, bytes] = {}
        at = 32
        for _ in range(headers):
            number, size = struct.unpack_from("<HQ", head, at)
            self.headers.setdefault(number, head[at + 10 : at + 10 + size])
            at += 10 + size
        self.payload = head[len(head) - payload_size :]


def integer(number: int) -> bytes:
    return b"\3" + struct.pack("<q", number)


def text(content: str | bytes) -> bytes:
    return b"\6" + string(content.encode() if isinstance(content, str) else content)


def counted(tag: int, *values: bytes) -> bytes:
    return bytes([tag]) + struct.pack("<I", len(values)) + b"".join(values)


def result(value: bytes) -> bytes:
    return b"\0" + value


TENSOR, RREF, LIST, TUPLE, DICT, OBJECT = 8, 14, 9, 10, 11, 20


def index(tag: int, number: int = 0) -> bytes:
    return bytes([tag]) + struct.pack("<I", number)


# --- the truth -------------------------------------------------------------------------------------------------------
class Self:
    """A start of the callee: its id, its incarnation, and the numbers that it has used."""

    def __init__(self, rank: int, incarnation: int, caller: int) -> None:
        self.rank, self.incarnation, self.caller = rank, incarnation, caller
        self._counter = itertools.count(1)
        self._deliveries = itertools.count(incarnation + 1)
        self.sent_by_caller = 0  # the number of the latest message of a context with a tensor that requires grad

    def number(self) -> int:
        return next(self._counter)

    def autograd_number(self) -> int:
        return self.rank << 48 | next(self._counter)

    def id(self, key: int | None = None) -> bytes:
        key = int.from_bytes(os.urandom(8), "little") if key is None else key
        return struct.pack("<iQQ", self.rank, self.number(), key)

    def fork(self, **lies: Any) -> bytes:
        """Return a fork, for the caller, of a value of this callee."""
        fields = {
            "rref": self.id(),
            "fork": self.id(),
            "owner": self.rank,
            "owner_incarnation": self.incarnation,
            "parent": self.rank,
            "parent_incarnation": self.incarnation,
            "creation": NO_NUMBER,
            "delivery": next(self._deliveries),
        } | lies
        ids = fields["rref"] + fields["fork"]
        return ids + struct.pack("<iQiQQQ", *list(fields.values())[2:])


class Truth:
    """Answers requests truthfully. `function_result`: the value that the called function returns, with its headers."""

    def __init__(self, me: Self) -> None:
        self.me = me

    def reply(self, request: Request, function_result: str) -> Message:
        kind = request.kind
        message = Message(REPLY, request.call)
        if kind in FETCHES:
            self._put_result(message, "number")
        elif kind in (OPERATOR, FUNCTION):
            self._put_result(message, "tensor" if kind == OPERATOR else function_result)
        elif kind == GRADIENTS:
            self._put_gradients(message)
        elif kind == OPTIM_CREATE:
            self._put_result(message, "rref")
        elif kind == NAME_FIND:
            message.headers.append((FORKS, self.me.fork()))
        elif kind == INSPECT:
            message.payload = counted(DICT)
        self._put_context(message, request)
        return message

    def _put_result(self, message: Message, what: str) -> None:
        if what == "tensor":
            message.tensors = [floats(2, 2, 2, 2)]
            message.payload = result(index(TENSOR))
        elif what == "rref":
            message.headers.append((FORKS, self.me.fork()))
            message.payload = result(index(RREF))
        else:
            message.payload = result(integer(6))

    def _put_context(self, message: Message, request: Request) -> None:
        content = request.headers.get(CONTEXT)
        if not content or len(content) < 20:
            return
        context, sent, count = struct.unpack_from("<qqI", content)
        if sent == 0 or count == 0:
            message.headers.append((CONTEXT, struct.pack("<qqIB", context, 0, 0, 1)))
            return
        message.tensors = [strided(FLOAT, [4], struct.pack("<4f", 2, 2, 2, 2), REQUIRES_GRAD)]
        message.payload = result(index(TENSOR))
        answered = struct.pack("<qqIBq", context, self.me.autograd_number(), 1, 1, sent)
        message.headers.append((CONTEXT, answered))

    def _put_gradients(self, message: Message) -> None:
        message.payload = struct.pack("<qB", self.me.sent_by_caller, 1)
        message.tensors = [floats(2, 2, 2, 2)]

    def note(self, request: Request) -> None:
        content = request.headers.get(CONTEXT)
        if content and len(content) >= 20 and struct.unpack_from("<I", content, 16)[0]:
            self.me.sent_by_caller = struct.unpack_from("<q", content, 8)[0]


# --- lies ------------------------------------------------------------------------------------------------------------
@dataclass
class Told:
    """What a lie consists of: bytes to send, and what follows: the true reply, silence or the end of the connection."""

    pieces: list[bytes]
    then: str = ""
    spoils: bool = False  # nothing that follows over this connection can be understood


@dataclass
class Moment:
    """When a lie is told: the request, the connection, the true reply and the other requests that wait for a reply."""

    request: Request
    connection: Connection
    truth: Message
    waiting: list[int]


LieFunction = Callable[[Moment], Told]


class Lies:
    """Makes lies. All that is random comes from `dice`."""

    def __init__(self, dice: random.Random, me: Self, recorded: list[bytes], marker: Path) -> None:
        self.dice, self.me, self.recorded, self.marker = dice, me, recorded, marker
        self.kinds: dict[str, LieFunction] = {
            "none: the true reply": lambda now: Told([], "truth"),
            "call id": self.wrong_id,
            "id of another call": self.id_of_another,
            "reply twice": self.twice,
            "kind that does not belong to the request": self.foreign_reply,
            "header": self.header,
            "kind of message": self.any_kind,
            "error code": self.error_code,
            "error text": self.error_text,
            "error detail": self.error_detail,
            "count": self.count,
            "length": self.length,
            "tensor": self.tensor,
            "sparse or quantized tensor": self.parts,
            "views of shared memory": self.views,
            "segment": self.segment,
            "value": self.value,
            "value with objects": self.objects,
            "pickle": self.pickle,
            "RRef": self.rref,
            "creator or owner of an RRef": self.maker,
            "autograd context": self.context,
            "gradients": self.gradients,
            "STARTED": self.started,
            "CANCEL": self.cancel,
            "GOODBYE": self.goodbye,
            "flood": self.flood,
            "partial frame": self.partial,
            "many GB announced": self.announced,
            "request of the callee": self.asks_back,
            "request about what it received": self.asks_about_received,
            "noise": lambda now: Told([self.noise(200)], self.end(), True),
            "flipped bytes": self.flipped,
            "truncated reply": self.truncated,
            "extended reply": self.extended,
            "records of encryption": self.records,
            "positions of a ring": self.ring,
            "slab": self.slab,
            "slab that changes": self.changing_slab,
        }

    # --- choices ---

    def number(self, bits: int = 64) -> int:
        numbers = [*NUMBERS, self.me.incarnation, self.dice.randrange(2**64), self.dice.randrange(64)]
        return self.dice.choice(numbers) % 2**bits

    def signed(self) -> int:
        return self.number() - 2**63 if self.dice.random() < 0.2 else self.number() % 2**63

    def noise(self, most: int) -> bytes:
        return self.dice.randbytes(self.dice.randint(1, most))

    def end(self) -> str:
        return self.dice.choice(["close", "close", "close", "silence"])

    def nasty(self) -> bytes:
        part = self.dice.choice([*(each.encode() for each in NASTY), NOT_UTF8, self.noise(20)])
        return part * self.dice.choice([1, 1, 3, 1000])

    def worker(self) -> int:
        return self.dice.choice([0, 1, 2, self.me.rank, 3, 7, -1, -(2**31), 2**31 - 1])

    # --- replies ---

    def wrong_id(self, now: Moment) -> Told:
        call = now.request.call
        ids = [self.number(), call + 1, call - 1, call + self.dice.randrange(-40, 40), -call, 0]
        others = [other % 2**64 for other in ids if other % 2**64 not in (call, *now.waiting)]
        return Told([now.truth.stream(call=self.dice.choice(others))])

    def id_of_another(self, now: Moment) -> Told:
        """A false reply, often for all calls that the caller may have made to others lately."""
        call = now.request.call
        near = [other % 2**64 for other in range(call - 30, call + 30) if other != call]
        if now.waiting and self.dice.random() < 0.5:
            near = now.waiting
        kind, payload = self.dice.choice([(REPLY, result(integer(999))), (ERROR, self.error_payload(2, b"false"))])
        return Told([Message(kind, other, payload).stream() for other in near])

    def twice(self, now: Moment) -> Told:
        other = Message(ERROR, now.request.call, self.error_payload(self.dice.randrange(22), b"false"))
        pieces = [now.truth.stream(), *[now.truth.stream()] * self.dice.choice([1, 1, 30]), other.stream()]
        if self.dice.random() < 0.3:
            self.dice.shuffle(pieces)
        return Told(pieces)

    def reply_of(self, now: Moment, kind: int) -> Message:
        call = now.request.call
        empty = Message(REPLY, call)
        numbers = struct.pack("<4q", *(self.signed() for _ in range(4)))
        return {
            0: empty,
            1: Message(REPLY, call, result(index(RREF)), [(FORKS, self.me.fork())]),
            2: Message(REPLY, call, b"", [(FORKS, self.me.fork() + self.me.fork())]),
            3: Message(REPLY, call, struct.pack("<qB", self.signed(), 1), tensors=[floats(1, 2)]),
            4: Message(REPLY, call, numbers[: self.dice.randrange(33)]),
            5: Message(REPLY, call, counted(DICT, text("calls"), integer(1))),
            6: Message(REPLY, call, b"\1"),
            7: Message(REPLY, call, result(integer(6))),
            8: Message(REPLY, call, result(index(TENSOR)), tensors=[floats(1, 2, 3)]),
            9: Message(REPLY, call, counted(LIST, counted(DICT, text("step"), index(TENSOR))), tensors=[floats(1)]),
            10: Message(REPLY, call, b"\2" + short(b"token")),
            11: Message(REPLY, call, b"", tensors=[strided(BYTE, [9], b"123456789")]),
        }[kind]

    def foreign_reply(self, now: Moment) -> Told:
        message = self.reply_of(now, self.dice.randrange(12))
        message.headers += now.truth.headers if self.dice.random() < 0.3 else []
        return Told([message.stream()])

    def header(self, now: Moment) -> Told:
        message = now.truth
        for _ in range(self.dice.choice([1, 1, 2, 65])):
            contents = [b"", self.noise(60), struct.pack("<Q", self.number()) * self.dice.randrange(1, 6)]
            contents += [struct.pack("<I", self.number(32)) + self.noise(40), self.me.fork(), self.profile()]
            number = self.dice.choice([*HEADERS, self.number(16)])
            message.headers.insert(0, (number, self.dice.choice(contents)))
        return Told([message.stream()])

    def profile(self) -> bytes:
        """An event of a profile."""
        event = struct.pack("<H", self.dice.randrange(5)) + string(self.nasty()[:2000])
        event += struct.pack("<QQqqqqqQB", *(self.number() for _ in range(2)), *(self.signed() for _ in range(5)), 0, 7)
        shapes = struct.pack("<I", self.number(32) if self.dice.random() < 0.5 else 0)
        return (event + shapes + struct.pack("<I", 0)) * self.dice.choice([1, 2, 100])

    def any_kind(self, now: Moment) -> Told:
        kinds = [self.dice.choice(KINDS) if self.dice.random() < 0.7 else self.number(16) for _ in range(3)]
        one_way = {1, PING, PONG, STARTED, GOODBYE, CANCEL}
        payload = self.dice.choice([now.truth.payload, self.noise(40)])
        frames = [Message(kind, 0 if kind in one_way else now.request.call, payload).stream() for kind in kinds]
        if self.dice.random() < 0.3:
            frames.append(hello(self.worker(), self.dice.choice(["worker0", "", "x" * 500]), self.number()))
        return Told(frames, "close" if GOODBYE in kinds else "")

    # --- errors ---

    def error_payload(self, code: int, message: bytes = b"", worker: bytes = b"", detail: bytes = b"") -> bytes:
        return struct.pack("<H", code) + string(message) + string(worker) + string(detail)

    def error(self, now: Moment, payload: bytes) -> Told:
        headers = []
        if self.dice.random() < 0.5:
            headers.append((ORIGIN, self.dice.choice([b"", b"\1", b"\2", b"\3", b"\4", b"\5", b"\xff", b"12"])))
        if self.dice.random() < 0.5:
            name = self.dice.choice([b"ValueError", b"os.system", b"SystemExit", self.nasty()])
            headers.append((EXCEPTION_TYPE, name))
        if self.dice.random() < 0.2:
            headers.append((9, b""))  # says that the call has not begun
        return Told([Message(ERROR, now.request.call, payload, headers).stream()])

    def error_code(self, now: Moment) -> Told:
        code = self.dice.choice([*range(23), 255, 65535])
        worker = self.dice.choice([b"", b"worker0", b"worker1", b"worker2", b"nobody", self.nasty()])
        return self.error(now, self.error_payload(code, b"a false reason", worker))

    def error_text(self, now: Moment) -> Told:
        texts = [self.nasty(), b"x" * self.dice.choice([100, 70_000, 4 << 20]), b"", NOT_UTF8 * 1000]
        texts.append(b"line\n" * self.dice.choice([2, 50_000]))
        return self.error(now, self.error_payload(self.dice.choice([*range(22)]), *self.dice.sample(texts, 2)))

    def error_detail(self, now: Moment) -> Told:
        """The detail of an exception: made up, or a true one in which something is changed."""
        choice = self.dice.randrange(4)
        if choice == 0 and self.recorded:
            frame = bytearray(self.dice.choice(self.recorded))
            struct.pack_into("<Q", frame, 16 + 8, now.request.call)
            for _ in range(self.dice.choice([0, 1, 3, 20])):
                frame[self.dice.randrange(16 + 32, len(frame))] = self.dice.randrange(256)
            return Told([bytes(frame)])
        detail = self.dice.choice([self.noise(80), self.object_value(), counted(TUPLE, *[integer(1)] * 4)])
        if choice == 1:
            detail = self.exception_detail()
        code = self.dice.choice([5, 5, 14, *range(22)])
        return self.error(now, self.error_payload(code, b"a false reason", b"", detail))

    def exception_detail(self) -> bytes:
        """The form of a true detail, with types that must not be raised, a pickle, or wrong indices."""
        names = [("builtins", "SystemExit"), ("builtins", "KeyboardInterrupt"), ("builtins", "GeneratorExit")]
        names += [
            ("builtins", "ValueError"),
            ("builtins", "object"),
            ("os", "system"),
            ("", ""),
            ("torchrpc", "x" * 99),
        ]
        module, name = self.dice.choice(names)
        types = counted(LIST, counted(TUPLE, text(module), text(name)))
        arguments = counted(TUPLE, counted(TUPLE, text(self.dice.choice(NASTY))), counted(DICT))
        pickled = self.dice.choice([b"", self.pickled()])
        described = counted(
            TUPLE, types, b"\7" + string(arguments), b"\7" + string(counted(DICT)), b"\7" + string(pickled)
        )
        node = counted(
            TUPLE,
            *[text(self.dice.choice([*NASTY, "text"])) for _ in range(2)],
            b"\7" + string(described),
            text(""),
            *[self.dice.choice([b"\0", integer(0), integer(self.signed())]) for _ in range(2)],
            b"\1",
            counted(LIST, *[integer(self.dice.choice([0, 1, self.signed()]))] * self.dice.randrange(3)),
        )
        nodes = counted(LIST, *[node] * self.dice.choice([0, 1, 2, 300]))
        numbers = [integer(self.dice.choice([0, 5, self.signed()])) for _ in range(2)]
        return counted(TUPLE, b"\7" + string(described), nodes, *numbers)

    # --- the form of frames ---

    def count(self, now: Moment) -> Told:
        name = self.dice.choice(["headers", "tensors", "segments"])
        return Told([now.truth.stream(**{name: self.number(32)})])

    def length(self, now: Moment) -> Told:
        name = self.dice.choice(["payload_size", "head_size", "stream_segments", "stream_flags", "sizes"])
        if name == "payload_size":
            return Told([now.truth.stream(payload_size=self.number())])
        if name == "sizes":
            sizes = [self.number() for _ in range(self.dice.randrange(1, 40))]
            return Told([now.truth.stream(sizes=sizes, stream_segments=len(sizes))], self.end(), True)
        value = self.number(64 if name == "head_size" else 32)
        return Told([now.truth.stream(**{name: value})], self.end(), True)

    def partial(self, now: Moment) -> Told:
        large = strided(FLOAT, [1 << 18], bytes(1 << 20), in_segment=True)
        frame = self.dice.choice([now.truth, Message(REPLY, now.request.call, result(index(TENSOR)), tensors=[large])])
        sent = frame.stream()
        return Told([sent[: self.dice.randrange(1, len(sent))]], self.end(), True)

    def announced(self, now: Moment) -> Told:
        """A reply of many GB, of which some bytes follow."""
        size = self.dice.choice([1 << 31, 1 << 32, (1 << 32) + 1, 1 << 39, 1 << 40, (1 << 40) + 1, 2**63, 2**64 - 1])
        if self.dice.random() < 0.3:
            message = Message(REPLY, now.request.call, result(text("x")))
            return Told([message.stream(head_size=size) + bytes(100_000)], self.end(), True)
        huge = [Part(bytes([1, FLOAT, SEGMENT, 1]) + struct.pack("<q", size // 4 % 2**63), b"", True)]
        count = self.dice.choice([1, 2, 1000, 100_000])
        message = Message(REPLY, now.request.call, result(index(TENSOR)), tensors=[huge])
        return Told([message.stream(sizes=[size] * count, stream_segments=count) + bytes(70_000)], self.end(), True)

    def flipped(self, now: Moment) -> Told:
        frame = bytearray(now.truth.stream())
        for _ in range(self.dice.choice([1, 1, 2, 8])):
            frame[self.dice.randrange(len(frame))] ^= 1 << self.dice.randrange(8)
        return Told([bytes(frame)])

    def truncated(self, now: Moment) -> Told:
        """A head that ends early, and says so."""
        frame = now.truth.stream()
        cut = frame[: self.dice.randrange(16, len(frame))]
        return Told([struct.pack("<Q", len(cut) - 16) + cut[8:]])

    def extended(self, now: Moment) -> Told:
        message = now.truth
        message.payload += self.noise(30)
        return Told([message.stream()])

    # --- tensors ---

    def with_tensors(self, now: Moment, *tensors: Tensor, **lies: Any) -> Told:
        headers = [header for header in now.truth.headers if header[0] == CONTEXT]
        message = Message(REPLY, now.request.call, result(index(TENSOR)), headers, list(tensors))
        return Told([message.stream(**lies)], "close" if lies else "")

    def sizes(self) -> list[int]:
        most = self.dice.choice([2, 3, 3, 64, 255])
        return [self.dice.choice([0, 1, 2, 3, 4, self.signed()]) for _ in range(self.dice.randrange(most + 1))]

    def tensor(self, now: Moment) -> Told:
        """A strided tensor whose dtype, bits, sizes, strides or data are false."""
        sizes, strides, data = [4], None, struct.pack("<4f", 1, 2, 3, 4)
        dtype, bits = FLOAT, 0
        for lie in self.dice.sample(["dtype", "bits", "sizes", "strides", "data", "form"], self.dice.choice([1, 1, 2])):
            if lie == "dtype":
                dtype = self.dice.choice([*range(50), 255])
            elif lie == "bits":
                bits = self.dice.randrange(256) & ~(STRIDES | SEGMENT)
            elif lie == "sizes":
                sizes = self.sizes()
            elif lie == "strides":
                count = self.dice.choice([len(sizes), len(sizes), self.dice.randrange(5)])
                strides = [self.dice.choice([0, 1, 2, self.signed()]) for _ in range(count)]
            elif lie == "data":
                data = self.dice.choice([b"", data[:7], data * 3])
        tensor = strided(dtype, sizes, data, bits, strides, self.dice.random() < 0.3)
        if self.dice.random() < 0.2:
            tensor[0].prefix = bytes([self.dice.randrange(8)]) + tensor[0].prefix[1:]
        return self.with_tensors(now, tensor)

    def parts(self, now: Moment) -> Told:
        """A sparse or quantized tensor: indices out of range, scales of the wrong length, parts of another dtype."""
        form = self.dice.choice([2, 2, 3, 4, 5])
        sizes = self.dice.choice([[4], [3, 3], self.sizes()[:5]])
        bits = self.dice.choice([0, 0, COALESCED, REQUIRES_GRAD, self.dice.randrange(256)])
        numbers = [self.dice.choice([0, 1, 2, 3, self.signed()]) for _ in range(self.dice.randrange(1, 7))]
        rows = self.dice.choice([[len(sizes), len(numbers)], [len(numbers)], [1, len(numbers)]])
        indices = strided(LONG, rows, struct.pack(f"<{len(numbers)}q", *numbers) * (rows[0] if len(rows) == 2 else 1))
        values = floats(*[1.0] * self.dice.choice([len(numbers), 1, 5]))
        if form == 2:
            outer, inner = bytes([2, 0, bits, len(sizes)]) + struct.pack(f"<{len(sizes)}q", *sizes), [indices, values]
        elif form == 3:
            layout = self.dice.choice([3, 4, 5, 6, 0, 255])
            outer = bytes([3, layout, bits, len(sizes)]) + struct.pack(f"<{len(sizes)}q", *sizes)
            inner = [indices, self.dice.choice([indices, values]), values]
        elif form == 4:
            scale = self.dice.choice([1.0, 0.0, -1.0, float("nan"), float("inf"), 1e308])
            outer = bytes([4, 0, bits & 1, 0]) + struct.pack("<dq", scale, self.signed())
            inner = [self.dice.choice([strided(1, [4], b"1234"), strided(3, [1], b"1234"), values])]
        else:
            outer = bytes([5, 0, bits & 1, 0]) + struct.pack("<q", self.dice.choice([0, 1, -1, self.signed()]))
            inner = [values, self.dice.choice([indices, values]), strided(1, [len(numbers), 1], b"1" * len(numbers))]
        return self.with_tensors(now, [Part(outer), *itertools.chain(*inner)])

    def views(self, now: Moment) -> Told:
        """Views outside of their memory, or that begin between elements; indices that do not exist."""
        view = strided(FLOAT, self.dice.choice([[4], [2], self.sizes()]), b"", META, self.dice.choice([None, [1], [3]]))
        memory = strided(BYTE, [16], bytes(16))
        entries = [self.dice.choice([0, 1, self.number(32)]) for _ in range(2)]
        offset = self.dice.choice([0, 1, 4, 12, 16, self.number()])
        entry = struct.pack("<IIQ", *entries, offset)
        content = struct.pack("<I", self.dice.choice([1, 1, 0, self.number(32)])) + entry * self.dice.choice([1, 1, 2])
        message = Message(REPLY, now.request.call, result(index(TENSOR)), [(SHARED_STORAGES, content)], [view, memory])
        message.flags = self.dice.choice([1, 1, 1, 0])
        return Told([message.stream()])

    def segment(self, now: Moment) -> Told:
        """Segments of a wrong size, too many or too few, or in slabs that this connection may not have."""
        tensor = strided(FLOAT, [2048], bytes(8192), in_segment=True)
        lie = self.dice.randrange(4)
        if lie == 0:
            return self.with_tensors(now, tensor, segments=self.number(32))
        if lie == 1:
            return self.with_tensors(now, tensor, sizes=[self.dice.choice([0, 8191, 8193, self.number()])])
        if lie == 2:
            return self.with_tensors(now, tensor, slab_offsets=[self.dice.choice([0, 1, 65536, self.number()])])
        tensor[0].data = self.dice.choice([b"", bytes(8191), bytes(8200)])
        return self.with_tensors(now, tensor, *[tensor] * self.dice.choice([0, 1, 50]))

    # --- values ---

    def plain_value(self, depth: int = 0) -> bytes:
        """A value of the plain form with a wrong tag, count, length or index somewhere."""
        tag = self.dice.choice([*range(26), self.dice.randrange(256)])
        count = struct.pack("<I", self.dice.choice([0, 1, 2, self.number(32)]))
        if tag in (LIST, TUPLE, DICT) and depth < 4:
            values = [self.plain_value(depth + 1) for _ in range(self.dice.randrange(4))]
            return counted(tag, *values) if self.dice.random() < 0.6 else bytes([tag]) + count + b"".join(values)
        lengths = [struct.pack("<Q", self.number()) + self.noise(9), string(self.nasty()), string(NOT_UTF8)]
        return bytes([tag]) + self.dice.choice([b"", count, self.noise(16), *lengths])

    def value(self, now: Moment) -> Told:
        message = now.truth
        deep = counted(LIST, b"\0")[:-1] * self.dice.choice([3, 999, 1001, 200_000]) + b"\0"
        keys = counted(DICT, *[integer(1), b"\0", integer(1), b"\0"])[:5] + (integer(1) + b"\0") * 4
        lists = counted(LIST, *[index(self.dice.choice([17, 18]))] * self.dice.choice([3, 3000]))
        message.tensors = [strided(LONG, [300], struct.pack("<300q", *range(300)))]
        value = self.dice.choice([deep, keys, lists, *[self.plain_value() for _ in range(4)]])
        message.payload = result(value)
        return Told([message.stream()])

    def object_value(self) -> bytes:
        kinds = [b"global", b"object", b"exception", b"member", b"flags", b"constant", b"array", b"scalar", b"dtype"]
        kinds += [b"ScriptFunction", b"bytearray", b"range", b"slice", b"Decimal", b"Fraction", b"date", b"timedelta"]
        kinds += [
            b"UUID",
            b"Size",
            b"WorkerInfo",
            b"surrogates",
            b"UntypedStorage",
            b"TypedStorage",
            b"PosixPath",
            b"x",
        ]
        names = [("os", "system"), ("builtins", "eval"), ("collections", "OrderedDict"), ("builtins", "ValueError")]
        names += [("builtins", "SystemExit"), ("torch", "Tensor"), ("nowhere.module", "x"), ("", "")]
        module, name = self.dice.choice(names)
        parts = [text(module), text(name), self.dice.choice([counted(TUPLE), counted(DICT), self.plain_value()])]
        parts += [self.dice.choice([counted(DICT, text("a"), integer(1)), self.plain_value(), integer(self.signed())])]
        parts = parts[: self.dice.randrange(5)]
        made = bytes([OBJECT]) + short(self.dice.choice(kinds)) + struct.pack("<I", len(parts)) + b"".join(parts)
        again = bytes([21]) + struct.pack("<I", self.number(32))
        digits = bytes([22]) + string(self.dice.choice([b"0x", b"-0x1", b"0x" + b"f" * 70_000, b"1", self.nasty()]))
        sets = counted(self.dice.choice([23, 24]), *[self.dice.choice([integer(1), made, counted(LIST)])] * 2)
        return self.dice.choice([made, made, made, again, digits, sets, counted(LIST, made, again)])

    def objects(self, now: Moment) -> Told:
        message = now.truth
        message.payload = b"\2" + self.object_value()
        return Told([message.stream()])

    def pickled(self) -> bytes:
        """A pickle that makes a folder if it is read."""
        path = str(self.marker).encode()
        return b"cos\nmkdir\n(V" + path + b"\ntR."

    def pickle(self, now: Moment) -> Told:
        """A pickle for a caller that reads none."""
        message = now.truth
        end = struct.pack("<I", self.dice.choice([0, 1, self.number(32)]))
        message.payload = b"\1" + self.dice.choice([self.pickled(), self.pickled(), self.noise(60)]) + end
        return Told([message.stream()])

    # --- RRefs ---

    def with_forks(self, now: Moment, forks: bytes, count: int = 1) -> Told:
        """A result that refers to the forks, or the true reply with forks to which nothing refers."""
        message = now.truth
        message.headers = [each for each in message.headers if each[0] != FORKS] + [(FORKS, forks)]
        if self.dice.random() < 0.7:
            message.payload = result(counted(LIST, *[index(RREF, n) for n in range(count)]))
        return Told([message.stream()])

    def rref(self, now: Moment) -> Told:
        """Numbers that are used up, repeated or far ahead, incarnations of others, keys, indices, and many forks."""
        rref, fork = self.me.id(), self.me.id()
        lies: dict[str, Any] = {}
        for name in self.dice.sample(["owner_incarnation", "parent_incarnation", "creation", "delivery"], 2):
            lies[name] = self.dice.choice([self.number(), self.me.incarnation + self.dice.randrange(-3, 40)])
        choice = self.dice.randrange(5)
        if choice == 0:
            lies["delivery"] = self.me.incarnation + 1
            return self.with_forks(now, self.me.fork(rref=rref, fork=fork, **lies) * 2, 2)
        if choice == 1:
            count = self.dice.choice([10, 300])
            return self.with_forks(now, b"".join(self.me.fork() for _ in range(count)), count)
        if choice == 2:
            forks = self.me.fork(**lies)
            return self.with_forks(now, forks[: self.dice.randrange(len(forks))] + self.noise(9))
        if choice == 3:
            return self.with_forks(now, self.me.fork(**lies), self.dice.choice([0, 2, 70_000]))
        return self.with_forks(now, self.me.fork(rref=self.me.id(key=self.number()), fork=fork, **lies))

    def maker(self, now: Moment) -> Told:
        """Made-up owners, parents and makers of the ids. An honest worker of which the callee says that it owns a value
        which another honest worker creates would wait for that creation as long as the creator lives, which the
        protocol allows; so either this callee is the creator, or the value has no creation number.
        """
        lies: dict[str, Any] = {}
        for name in self.dice.sample(["owner", "parent", "rref", "fork"], self.dice.choice([1, 1, 2])):
            made_up = struct.pack("<iQQ", self.worker(), self.number(), self.number())
            lies[name] = made_up if name in ("rref", "fork") else self.worker()
        if self.dice.random() < 0.5 and "rref" not in lies:
            lies["creation"] = self.me.incarnation + self.dice.randrange(1, 50)
        if self.dice.random() < 0.3:
            lies["owner_incarnation"] = self.number()
        return self.with_forks(now, self.me.fork(**lies))

    # --- autograd ---

    def context(self, now: Moment) -> Told:
        """The header of a context: false numbers, counts that do not fit the tensors, messages that were not sent."""
        message = now.truth
        true = next((content for number, content in message.headers if number == CONTEXT), b"")
        context = struct.unpack_from("<q", true)[0] if true else self.me.autograd_number()
        if self.dice.random() < 0.3:
            context = self.me.rank << 48 | self.number(48)
        sent = self.dice.choice([0, self.me.autograd_number(), self.signed(), self.dice.randrange(2) << 48 | 1])
        count, has_list = self.dice.choice([0, 1, 2, self.number(32)]), self.dice.randrange(3)
        listed = [self.signed() for _ in range(self.dice.choice([0, 1, 2, 5000]))]
        content = struct.pack("<qqIB", context, sent, count, has_list) + struct.pack(f"<{len(listed)}q", *listed)
        message.headers = [(CONTEXT, content + self.noise(8)[: self.dice.choice([0, 0, 3])])]
        if self.dice.random() < 0.5:
            message.tensors = [strided(FLOAT, [2], bytes(8), REQUIRES_GRAD)] * self.dice.choice([1, 2])
            message.payload = result(index(TENSOR))
        return Told([message.stream()])

    def gradients(self, now: Moment) -> Told:
        """The reply to a backward pass: another message, other flags, gradients of another shape or dtype."""
        number = self.dice.choice([self.me.sent_by_caller, self.signed(), self.me.autograd_number()])
        flags = bytes(self.dice.choice([0, 1, 2, 255]) for _ in range(self.dice.choice([0, 1, 2, 100])))
        shapes = [floats(1), floats(*[1.0] * 5), strided(LONG, [4], bytes(32)), strided(FLOAT, [2, 2], bytes(16))]
        shapes += [
            strided(FLOAT, [4], b"", META),
            strided(COMPLEX, [4], bytes(32)),
            strided(FLOAT, [0]),
            [Part(bytes(4))],
        ]
        tensors = [self.dice.choice(shapes) for _ in range(self.dice.choice([0, 1, 1, 2, 50]))]
        return Told([Message(REPLY, now.request.call, struct.pack("<q", number) + flags, [], tensors).stream()])

    # --- other messages ---

    def started(self, now: Moment) -> Told:
        window = struct.pack("<Q", self.number())
        ids = [
            self.dice.choice([now.request.call, *now.waiting, self.number()])
            for _ in range(self.dice.choice([0, 1, 9]))
        ]
        payload = window + struct.pack(f"<{len(ids)}Q", *ids) + self.noise(7)[: self.dice.choice([0, 0, 5])]
        return Told([Message(STARTED, 0, payload).stream()] * self.dice.choice([1, 1, 200]))

    def cancel(self, now: Moment) -> Told:
        call = now.request.call
        ids = [call, *now.waiting, self.number(), *range(call - 20, call + 20)]
        frames = [Message(CANCEL, 0, struct.pack("<QB", each % 2**64, self.dice.randrange(3))).stream() for each in ids]
        return Told([*frames, Message(CANCEL, 0, self.noise(12)).stream()])

    def goodbye(self, now: Moment) -> Told:
        frame = Message(GOODBYE, self.dice.choice([0, 0, self.number()]), self.dice.choice([b"", b"", self.noise(9)]))
        after = [now.truth.stream(), self.noise(100), frame.stream(), b""]
        return Told([frame.stream(), self.dice.choice(after)], self.end(), True)

    def flood(self, now: Moment) -> Told:
        kind = self.dice.choice([PONG, PING, STARTED, CANCEL, REPLY, ERROR])
        payload = {STARTED: struct.pack("<Q", 1 << 20), CANCEL: bytes(9), ERROR: self.error_payload(5)}.get(kind, b"")
        call = self.number() if kind in (REPLY, ERROR) else 0
        return Told([Message(kind, call, payload).stream() * 20_000])

    def asks_back(self, now: Moment) -> Told:
        """Requests of all kinds with made-up content, instead of a reply."""
        frames = []
        for _ in range(self.dice.choice([1, 3, 40])):
            kind = self.dice.choice([kind for kind in KINDS if kind > CANCEL])
            ids = self.me.id() + self.me.id() + struct.pack("<QQ", self.number(), self.number())
            content = self.dice.choice([self.noise(80), ids, b"", now.request.payload[:200]])
            frames.append(Message(kind, self.dice.choice([1, now.request.call, self.number()]), content).stream())
        return Told(frames)

    def asks_about_received(self, now: Moment) -> Told:
        """Requests about the forks and the context that came with the request, with one number changed."""
        frames = []
        forks = now.request.headers.get(FORKS, b"")
        for at in range(0, len(forks) - 79, 80):
            fork = bytearray(forks[at : at + 80])
            for _ in range(self.dice.choice([0, 1])):
                fork[self.dice.randrange(40)] ^= 1 << self.dice.randrange(8)
            ids, creation = bytes(fork[:40]), bytes(fork[64:72])
            registration = struct.pack("<Q", self.me.incarnation + self.dice.randrange(1, 4))
            bodies = {FORK_REQUEST: ids + creation + registration, CHILD_ACCEPT: ids[20:]}
            bodies |= {USER_DELETE: ids + registration, 49: ids + creation + registration}
            for kind in self.dice.sample(list(bodies), 3):
                frames.append(Message(kind, self.number(), bodies[kind]).stream())
        content = now.request.headers.get(CONTEXT, b"")
        if len(content) >= 16:
            context, sent = struct.unpack_from("<qq", content)
            head = struct.pack("<qqBB", context, self.me.autograd_number(), self.dice.randrange(3), 0)
            numbers = struct.pack("<q", self.dice.choice([sent, self.signed()]))
            flags = struct.pack("<I", 1) + numbers + numbers + b"\1"
            shape = self.dice.choice([floats(1, 1, 1, 1), floats(1), strided(LONG, [4], bytes(32))])
            frames.append(Message(MARK, 1, head + numbers).stream())
            frames.append(Message(GRADIENTS, 2, head + flags, [], [shape]).stream())
            if self.dice.random() < 0.3:
                frames.append(Message(ABORT, 3, head + self.error_payload(5, self.nasty())).stream())
            snapshot = struct.pack("<iQqI", self.worker(), self.number(), self.signed(), 0)
            frames.append(Message(CLEANUP, 4, snapshot).stream())
            frames.append(Message(HELD, 5, struct.pack("<q", context)).stream())
        self.dice.shuffle(frames)
        return Told(frames)

    # --- the connection ---

    def records(self, now: Moment) -> Told:
        """Records that are damaged, of a false length, or END and ALARM in the middle of a frame."""
        stream = now.connection.stream
        frame = now.truth.stream()
        if not isinstance(stream, Records):
            return Told([frame[: len(frame) // 2]], "close", True)
        end = self.dice.choice([2**31, 2**31 + 1])
        lie = self.dice.randrange(5)
        with contextlib.suppress(OSError):
            if lie == 0:
                stream.send_record(frame, struct.pack("<I", len(frame)), damage=1 << self.dice.randrange(8))
            elif lie == 1:
                size = self.dice.choice([0, 65537, 2**31 - 1, 2**31 + 2, 2**32 - 1])
                stream.send_record(frame, struct.pack("<I", size))
            elif lie == 2:
                stream.sendall(frame[: len(frame) // 2])
                stream.send_record(b"", struct.pack("<I", end))
            elif lie == 3:
                stream.sendall(frame[: len(frame) // 2])
                now.connection.socket.sendall(struct.pack("<I", end) + self.noise(16))
            else:
                now.connection.socket.sendall(self.noise(300))
        return Told([], self.end(), True)

    def ring(self, now: Moment) -> Told:
        """Positions that no correct side has, in both directions, other wake-ups, and random bytes in the control."""
        rings = now.connection.stream
        if not isinstance(rings, Rings):
            return Told([self.noise(300)], self.end(), True)
        out, into = rings.out, rings.into
        frame = now.truth.stream()
        lie = self.dice.randrange(6)
        if lie == 0:
            rings.number(out, rings.WRITTEN).value = (
                rings.number(out, rings.WRITTEN).value + self.dice.choice([rings.RING + 1, -1, 2**63, 2**20])
            ) % 2**64
            rings.wake(out, rings.READER_WAITS)
            return Told([], self.end(), True)
        if lie == 1:
            rings.sendall(frame)
            rings.number(out, rings.BEGIN).value = self.number()
            return Told([], self.end(), True)
        if lie == 2:
            rings.number(into, rings.READ).value = self.number()
            rings.wake(into, rings.WRITER_WAITS)
            return Told([frame], "close", True)
        if lie == 3:
            for direction in (0, 1):
                for each in (rings.READER_WAITS, rings.WRITER_WAITS):
                    rings.flag(direction, each).value = self.number(32)
            return Told([frame], "close", True)
        if lie == 4:
            with contextlib.suppress(BlockingIOError):
                for _ in range(2000):
                    now.connection.socket.send(self.noise(64), socket.MSG_DONTWAIT)
            return Told([frame], "")
        for _ in range(200):
            at = self.dice.randrange(2 * rings.CONTROL - 8)
            rings.memory[at : at + 8] = self.dice.randbytes(8)
        rings.wake(out, rings.READER_WAITS)
        return Told([], self.end(), True)

    def slab(self, now: Moment) -> Told:
        """Slabs that are outside of the area, between units or leased already, and slabs that were never lent."""
        rings = now.connection.stream
        tensor = strided(FLOAT, [1 << 16], bytes(1 << 18), in_segment=True)
        offsets = [0, 65536, 1, 65535, Rings.SLABS, Rings.SLABS - 65536, Rings.SLABS - (1 << 18), self.number()]
        message = Message(REPLY, now.request.call, result(index(TENSOR)))
        message.tensors = [tensor] * self.dice.choice([1, 2, 2])
        message.slab_offsets = [self.dice.choice(offsets) for _ in message.tensors]
        if isinstance(rings, Rings):
            for _ in range(self.dice.choice([0, 50])):
                at = rings.into * rings.CONTROL + rings.RETURNED + self.dice.randrange(2048)
                rings.memory[at] = self.dice.choice([0, 1, 255])
            rings.number(rings.into, rings.RETURN_COUNT).value += self.dice.choice([0, 1, 2**40])
            rings.flag(rings.out, 512).value = self.dice.choice([0, 1, 2**32 - 1])  # copies that never end
        return Told([message.stream()], "" if isinstance(rings, Rings) else "close")

    def changing_slab(self, now: Moment) -> Told:
        """A sparse tensor whose indices are in a slab, and change while the caller checks them and afterwards."""
        rings = now.connection.stream
        if not isinstance(rings, Rings):
            return self.slab(now)
        count = 1 << 13
        indices = strided(LONG, [1, count], bytes(8 * count), in_segment=True)
        values = strided(FLOAT, [count], bytes(4 * count))
        outer = Part(bytes([2, 0, 0, 1]) + struct.pack("<q", 4))
        message = Message(REPLY, now.request.call, result(index(TENSOR)), [], [[outer, *indices, *values]])
        unit = self.dice.randrange(1000, 1500)
        message.slab_offsets = [unit * Rings.UNIT]
        at = rings.slabs_at(rings.out) + unit * Rings.UNIT
        zeros, far = bytes(8 * count), struct.pack("<q", 2**40) * count
        rings.memory[at : at + len(zeros)] = zeros
        rings.sendall(message.stream())
        end = time.monotonic() + 0.03  # the caller decodes the reply and adds up the tensor meanwhile
        while time.monotonic() < end:
            rings.memory[at : at + len(far)] = far
            rings.memory[at : at + len(far)] = zeros
        rings.memory[at : at + len(far)] = far
        return Told([], "truth")


# --- the handshake ---------------------------------------------------------------------------------------------------
def handshake_lies(dice: random.Random, lies: Lies) -> tuple[str, Callable[[str, Any], Any]]:
    """Return the name of a lie in the handshake of a listener, and the function that tells it."""
    parts = ["name", "setting", "proof", "memory", "REFUSAL"]
    parts += [f"{what}{name}" for what in ("", "flags of ", "payload of ") for name in ("WELCOME", "READY")]
    part = dice.choice(parts)

    def message(kind: int, rest: bytes, version: int = HANDSHAKE_VERSION) -> bytes:
        size = dice.choice([len(rest), len(rest), lies.number(16)])
        return b"torchrpc" + struct.pack("<HHHH", version, kind, size, dice.choice([0, 0, 1])) + rest

    def memory() -> int:
        choice = dice.randrange(5)
        if choice == 0:
            return os.open("/", os.O_RDONLY)
        if choice == 1:
            reader, writer = os.pipe()
            os.close(writer)
            return reader
        made = os.memfd_create("false", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(made, Rings.BYTES if choice == 2 else dice.choice([0, 4096, Rings.BYTES + 4096]))
        if choice != 2:
            Rings.seal(made)
        return made

    def twist(at: str, value: Any) -> Any:
        if at == "WELCOME" and part == "REFUSAL":
            return message(5, short(lies.nasty()[: dice.choice([20, 1024, 4000])]))
        if at != part:
            return value
        if at == "name":
            return dice.choice(["", "worker0", "worker1", "x" * 1500, "\x1b[2J", f"a\n{FORGED_LINE}"])
        if at == "setting":
            return dice.choice([b"x" * 65, b"\x1b[2J", b"\n" + FORGED_LINE.encode(), NOT_UTF8])
        if at == "proof":
            return dice.choice([b"", lies.noise(64), value[:-1], value + b"0", bytes(2049), value[64:] + value[:64]])
        if at == "flags of WELCOME":
            return dice.choice([0, 1, 2, 4, 8, 12, 255, 65535])
        if at == "flags of READY":
            return dice.choice([0, 1, 4, 8, 65535])
        if at == "memory":
            os.close(value)
            return memory()
        if at in ("payload of WELCOME", "payload of READY"):
            return dice.choice([b"", lies.noise(80), value[:-1], value + b"0"])
        changed = bytearray(value)
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
        kinds = [dice.randrange(9), dice.randrange(9)]
        choices = [bytes(changed), value[: dice.randrange(len(value))], value + value, lies.noise(100)]
        choices += [message(kinds[0], value[16:]), message(kinds[1], lies.noise(60)), message(4, value[16:], version=8)]
        return dice.choice(choices)

    return part, twist


def shrinking_file(folder: str) -> Callable[[str, Any], Any]:
    """Return the twist of a handshake that shares a file which has no seals, and shrinks when the opener has mapped it.
    An access to what is gone would end the opener's process.
    """

    def twist(at: str, value: Any) -> Any:
        if at == "memory":
            os.close(value)
            value, name = tempfile.mkstemp(dir=folder)
            os.unlink(name)
            os.ftruncate(value, Rings.BYTES)
        elif at == "READY is sent":
            end = time.monotonic() + 1
            while os.pread(value, 8, Rings.WRITTEN) == bytes(8) and time.monotonic() < end:
                time.sleep(0.001)  # between two looks at a condition: the opener writes into its ring, or refuses it
            os.ftruncate(value, 0)
            os.close(value)
            raise Refused("ended by this callee")
        return value

    return twist
