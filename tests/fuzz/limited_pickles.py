#!/usr/bin/env python3
"""Fuzzes the interpreter of pickles under an allow-list (torchrpc.rpc._limited_unpickler).

It makes pickles opcode by opcode, with names of plain data, of listed objects and of what an attacker would call, and
changes pickles of values. Whatever arrives, nothing outside the list may be called: an audit hook watches what the
interpreter of Python does, canaries note calls, and the classes and objects that the worker shares must stay as they
are. A pickle ends with a value or an Error of torchrpc, or with an exception of a listed class.

--seed and --executions choose the run; a finding prints the pickle and the way to read it again (--read HEX).
"""

import collections
import datetime
import decimal
import fractions
import pickle
import pickletools
import random
import struct
import sys
import uuid
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import canaries
import watching
from watching import ALLOWED

from torchrpc.rpc import internal
from torchrpc.rpc._allow_list import CALLED_BY_THE_PACKAGE
from torchrpc.rpc._limited_data import DATA
from torchrpc.rpc._limited_unpickler import _HANDLERS
from torchrpc.rpc._pickler import _LIMITED_HELPERS, _TRAVEL_AS_CODE, deserialize_allowed, deserialize_allowed_call

_LISTED = "Listed Slotted WithState Color Color.RED listed"
_UNLISTED = "Unlisted Unlisted.make Impostor unlisted Listed.method SHARED touched"
OWN = [f"canaries.{name}" for name in _LISTED.split()]
ATTACKS = [*watching.DANGEROUS.split(), *(f"canaries.{name}" for name in _UNLISTED.split())]
NAMES = [*DATA, *OWN, *OWN, *OWN, *ATTACKS, *_LIMITED_HELPERS, *_TRAVEL_AS_CODE, *CALLED_BY_THE_PACKAGE]
TEXTS = [
    "",
    "latin1",
    "value",
    "watched",
    "left",
    "__class__",
    "__dict__",
    "__reduce__",
    "__setstate__",
    "cpu",
    "é",
    "1e9",
]


class Program:
    """Writes a pickle, and knows roughly what is on its stack."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.bytes = bytearray()
        self.depth: list[int] = [0]  # of the stack above each mark
        self.memo = 0
        protocol = rng.choice((2, 3, 4, 4, 4, 5))
        self.bytes += bytes((0x80, protocol))

    def text(self, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        if len(data) < 256 and self.rng.random() < 0.8:
            self.bytes += pickle.SHORT_BINUNICODE + bytes((len(data),)) + data
        else:
            self.bytes += pickle.BINUNICODE + struct.pack("<I", len(data)) + data

    def name(self) -> None:
        module, _, name = self.rng.choice(NAMES).rpartition(".")
        if self.rng.random() < 0.1:  # another split: "canaries", "Unlisted.make"
            head, _, tail = module.rpartition(".")
            module, name = (head, f"{tail}.{name}") if head else (module, name)
        if self.rng.random() < 0.5:
            self.bytes += pickle.GLOBAL + f"{module}\n{name}\n".encode()
        else:
            self.text(module)
            self.text(name)
            self.bytes += pickle.STACK_GLOBAL

    def value(self, depth: int = 0) -> None:
        """Push one value."""
        rng = self.rng
        kind = rng.randrange(14 if depth < 5 else 6)
        if kind == 0:
            self.bytes += rng.choice((pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.EMPTY_TUPLE))
        elif kind == 1:
            self.bytes += pickle.BININT1 + bytes((rng.choice((0, 1, 2, 7, 255)),))
        elif kind == 2:
            self.text(rng.choice(TEXTS))
        elif kind == 3:
            data = rng.randbytes(rng.choice((0, 1, 4, 10, 16)))
            self.bytes += pickle.SHORT_BINBYTES + bytes((len(data),)) + data
        elif kind == 4 and self.memo:
            self.bytes += pickle.BINGET + bytes((rng.randrange(min(self.memo, 256)),))
        elif kind == 5:
            self.name()
        elif kind == 6:
            self.bytes += pickle.EMPTY_LIST
        elif kind == 7:
            self.bytes += pickle.EMPTY_DICT
        elif kind == 8:
            self.tuple(depth)
        elif kind in (9, 10):
            self.name()
            self.tuple(depth)
            self.bytes += rng.choice((pickle.REDUCE, pickle.REDUCE, pickle.NEWOBJ))
        elif kind == 11:
            self.name()
            self.tuple(depth)
            self.bytes += pickle.EMPTY_DICT + pickle.NEWOBJ_EX
        elif kind == 12:
            self.value(depth + 1)
            self.state(depth)
            self.bytes += pickle.BUILD
        else:
            self.bytes += rng.choice((pickle.EMPTY_DICT, pickle.EMPTY_LIST))
            self.fill(depth)
        if rng.random() < 0.2:
            self.bytes += pickle.MEMOIZE
            self.memo += 1

    def tuple(self, depth: int) -> None:
        count = self.rng.choice((0, 1, 1, 2, 2, 3, 5))
        if count in (1, 2, 3):
            for _ in range(count):
                self.value(depth + 1)
            self.bytes += (pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)[count - 1]
        else:
            self.bytes += pickle.MARK
            for _ in range(count):
                self.value(depth + 1)
            self.bytes += pickle.TUPLE

    def state(self, depth: int) -> None:
        if self.rng.random() < 0.3:
            return self.value(depth + 1)
        self.bytes += pickle.EMPTY_DICT + pickle.MARK
        for _ in range(self.rng.randrange(3)):
            self.text(self.rng.choice(TEXTS))
            self.value(depth + 1)
        self.bytes += pickle.SETITEMS
        if self.rng.random() < 0.3:
            self.bytes += pickle.NONE + pickle.TUPLE2

    def fill(self, depth: int) -> None:
        self.bytes += pickle.MARK
        for _ in range(self.rng.randrange(5)):
            self.value(depth + 1)
        self.bytes += self.rng.choice((pickle.APPENDS, pickle.SETITEMS, pickle.ADDITEMS))

    def finished(self, is_call: bool) -> bytes:
        if is_call:
            self.bytes += pickle.GLOBAL + f"{internal.PythonUDF.__module__}\nPythonUDF\n".encode()
            self.name()
            self.tuple(0)
            self.bytes += pickle.EMPTY_DICT + pickle.NEWFALSE + pickle.MARK
        self.value()
        return bytes(self.bytes + pickle.STOP)


def samples() -> list[bytes]:
    """Pickles of values that are allowed."""
    values = [
        {"a": [1, 2.5, None], (1, 2): {3, 4}},
        canaries.Listed([1, 2]),
        canaries.Color.RED,
        [fractions.Fraction(1, 3), decimal.Decimal("1.5"), uuid.UUID(int=5), datetime.datetime(2026, 1, 1)],
        collections.OrderedDict(a=collections.deque([1, 2], 3)),
        collections.defaultdict(list, a=[1]),
        [torch.float32, torch.device("cpu"), torch.Size([1, 2])],
        [Path("a/b"), range(3), slice(1, 2), bytearray(b"x"), frozenset({1}), complex(1, 2)],
    ]
    return [pickle.dumps(value, protocol) for value in values for protocol in (2, 3, 4, 5)]


def changed(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    opcodes = list(_HANDLERS) + [ord(opcode.code) for opcode in pickletools.opcodes]
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(out))
        change = rng.randrange(5)
        if change == 0:
            out[at] = rng.choice(opcodes)
        elif change == 1:
            out[at] = rng.randrange(256)
        elif change == 2:
            out[at:at] = bytes((rng.choice(opcodes),))
        elif change == 3:
            del out[at : at + rng.choice((1, 1, 3, 8))]
            out = out or bytearray(b".")
        else:
            module, _, name = rng.choice(NAMES).rpartition(".")
            out[at:at] = pickle.GLOBAL + f"{module}\n{name}\n".encode()
    return bytes(out)


def read(data: bytes, is_call: bool) -> str:
    """Read the pickle as a worker does. Return how that has ended."""
    function = deserialize_allowed_call if is_call else deserialize_allowed
    tensors = [torch.zeros(2), torch.zeros(3, dtype=torch.uint8)]
    return watching.outcome_of(lambda: function(data, tensors, ALLOWED), may_raise=b"canaries" in data)


def make(rng: random.Random, corpus: list[bytes]) -> tuple[bytes, bool]:
    is_call = rng.random() < 0.2
    data = changed(rng.choice(corpus), rng) if rng.random() < 0.4 else Program(rng).finished(is_call)
    if rng.random() < 0.05:
        data = changed(data, rng)
    return data, is_call


if __name__ == "__main__":
    sys.exit(watching.main(__doc__, "pickles", samples(), make, read))
