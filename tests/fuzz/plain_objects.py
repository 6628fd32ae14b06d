#!/usr/bin/env python3
"""Fuzzes what workers with `pickle="off"` read: the plain data of a message, and the objects that they stand for.

It makes the bytes of values by their structure (wire/value_codec.h, torchrpc/rpc/_plain_objects.py), with names of
registered and listed classes and of what an attacker would call, and changes bytes. Whatever arrives, nothing but the
constructors of registered and listed classes may run; a value ends with a value or an Error of torchrpc, or with an
exception of such a class.

--seed and --executions choose the run; a finding prints the bytes and the way to read them again (--read HEX).
"""

import random
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import canaries
import watching
from watching import ALLOWED

from torchrpc import _C, rpc
from torchrpc.rpc._plain_objects import _RESTORE, restore_call, restore_result

for registered in (canaries.Registered, canaries.Pair, canaries.Frozen):
    rpc.register_data_class(registered)

_DATA = "Registered Pair Frozen Listed Color"
_OTHERS = "Slotted WithState listed Unlisted Unlisted.make Impostor unlisted Listed.method"
_FIELDS = "value watched first second left right state method __class__ __dict__ __init__ _fields RED BLUE"
NAMES = [f"canaries.{name}" for name in 4 * _DATA.split() + _OTHERS.split()]
NAMES += ["builtins.int", "builtins.Exception", "enum.Enum", *watching.DANGEROUS.split()]
FIELDS = _FIELDS.split()
TEXTS = [*FIELDS, *_RESTORE, "", "0x1f", "-0x" + "f" * 40, "cpu", "cuda:7", "é", "worker1"]


class Value:
    """The bytes of a value, made at random."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.bytes = bytearray()

    def put(self, tag: int, layout: str = "", *fields: float) -> None:
        self.bytes += struct.pack(f"<B{layout}", tag, *fields)

    def text(self, text: str, tag: int = 6) -> None:
        data = text.encode()
        self.put(tag, "Q", len(data))
        self.bytes += data

    def name(self) -> None:
        module, _, name = self.rng.choice(NAMES).rpartition(".")
        self.text(module)
        self.text(name)

    def value(self, depth: int = 0) -> None:
        rng = self.rng
        kind = rng.randrange(9 if depth > 5 else 20)
        if kind < 3:
            self.put(kind)
        elif kind == 3:
            self.put(3, "q", rng.choice((0, 1, -1, 2**62, -(2**63))))
        elif kind == 3 + 16:
            self.put(16, "Q", rng.choice((5, 2**63, 2**64 - 1)))
        elif kind == 4:
            self.put(4, "d", rng.choice((0.5, float("nan"), float("inf"))))
        elif kind in (5, 6):
            self.text(rng.choice(TEXTS))
        elif kind == 7:
            self.text(rng.choice(TEXTS), rng.choice((7, 12)))
        elif kind == 8:
            self.put(rng.choice((5, 8, 13, 14, 15, 17, 18)), "I", rng.randrange(3))
        elif kind in (9, 10):
            self.many(9, rng.randrange(4), depth)
        elif kind in (11, 12):
            self.fields(depth)
        elif kind == 13:
            self.many(10, rng.randrange(3), depth)
        elif kind == 14:
            self.struct(depth)
        else:
            self.restorable(depth)

    def many(self, tag: int, count: int, depth: int) -> None:
        self.put(tag, "I", count)
        for _ in range(count):
            self.value(depth + 1)

    def fields(self, depth: int) -> None:
        chosen = self.rng.choice((["value"], ["first", "second"], ["left", "right"], FIELDS))
        if chosen is FIELDS:
            chosen = self.rng.sample(FIELDS, self.rng.randrange(4))
        self.put(11, "I", len(chosen))
        for name in chosen:
            self.text(name) if self.rng.random() < 0.95 else self.value(depth + 1)
            self.value(depth + 1)

    def struct(self, depth: int) -> None:
        self.text(self.rng.choice(("Struct", "Nowhere", "")), tag=19)
        fields = self.rng.sample(FIELDS[:4], self.rng.randrange(4))
        self.bytes += struct.pack("<I", len(fields))
        for name in fields:
            self.bytes += struct.pack("<H", len(name)) + name.encode()
            self.value(depth + 1)

    def restorable(self, depth: int) -> None:
        """A tuple that begins with the letter of what it stands for."""
        letter = self.rng.choice("tsfiSwgeeooooo")
        names = {"g": 2, "e": 2, "o": 2}.get(letter, 0)
        more = {"e": 1, "o": 1, "i": 1, "w": 2}.get(letter, self.rng.randrange(4) if not names else 0)
        self.put(10, "I", 1 + names + more)
        self.text(letter)
        if names:
            self.name()
        if letter == "o":
            self.fields(depth)
        elif letter == "e":
            self.text(self.rng.choice(("RED", "BLUE", "value")))
        else:
            for _ in range(more):
                self.value(depth + 1)

    def call(self) -> bytes:
        self.put(9, "I", 2)
        self.many(9, self.rng.randrange(4), 0)
        self.fields(0)
        return bytes(self.bytes)

    def result(self) -> bytes:
        self.value()
        return bytes(self.bytes)


def changed(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(out))
        change = rng.randrange(4)
        if change == 0:
            out[at] = rng.randrange(21)  # a tag
        elif change == 1:
            out[at] = rng.randrange(256)
        elif change == 2:
            out[at:at] = rng.randbytes(rng.choice((1, 4, 8)))
        else:
            del out[at : at + rng.choice((1, 4, 8))]
            out = out or bytearray(b"\0")
    return bytes(out)


def make(rng: random.Random, corpus: list[bytes]) -> tuple[bytes, bool]:
    is_call = rng.random() < 0.3
    fresh = Value(rng)
    data = changed(rng.choice(corpus), rng) if rng.random() < 0.4 else fresh.call() if is_call else fresh.result()
    return (changed(data, rng) if rng.random() < 0.05 else data), is_call


def read(data: bytes, is_call: bool) -> str:
    restore = restore_call if is_call else restore_result
    allowed = ALLOWED if len(data) % 2 else None  # a caller reads results without a list
    return watching.outcome_of(lambda: restore(_C._decode_plain(data), allowed), may_raise=b"canaries" in data)


if __name__ == "__main__":
    samples = [bytes((0,)), *(Value(random.Random(seed)).result() for seed in range(30))]
    sys.exit(watching.main(__doc__, "objects", samples, make, read))
