#!/usr/bin/env python3
"""Fuzzes what workers with `allowed_functions` or `pickle="off"` read: values with objects.

It makes the bytes of values by their structure (PROTOCOL.md, "Values with objects"), with names of registered and
listed classes and of what an attacker would call, and changes bytes. Whatever arrives, nothing but the constructors of
registered and listed dataclasses and NamedTuples may run; a value ends with a value or an Error of torchrpc, or with an
exception of such a class.

--seed and --executions choose the run; a finding prints the bytes and the way to read them again (--read HEX).
"""

import collections
import datetime
import decimal
import fractions
import random
import struct
import sys
import typing
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import canaries
import numpy as np
import torch
import watching
from watching import ALLOWED

from torchrpc import _C, rpc
from torchrpc.rpc._values import plain_objects, standard_kinds

for registered in (canaries.Registered, canaries.Pair, canaries.Frozen):
    rpc.register_data_class(registered)

_DATA = "Registered Pair Frozen Listed Color"
_OTHERS = "Slotted WithState listed Unlisted Unlisted.make Impostor unlisted Listed.method"
_FIELDS = "value watched first second left right state method __class__ __dict__ __init__ _fields RED BLUE"
NAMES = [f"canaries.{name}" for name in 4 * _DATA.split() + _OTHERS.split()]
NAMES += [f"canaries.{name}" for name in ["OwnList", "OwnDict", "OwnStr", "Access", "OwnError"] * 2]
NAMES += ["builtins.int", "builtins.Exception", "builtins.SyntaxError", "enum.Enum", *watching.DANGEROUS.split()]
NAMES += [f"collections.{name}" for name in ["OrderedDict", "deque", "Counter", "defaultdict"]]
FIELDS = _FIELDS.split()
KINDS = [*standard_kinds.MAKERS, *plain_objects._MAKERS_OF_CLASSES]
ENDS = ["1e9", "-1.5", "nan", "/a/b", "torch.strided", "NoneType", "Ellipsis"]
ENDS += ["<f4", "|b1", "<U3", ">i8", "<M8[s]", "|O", "S", "U3", "a"]
TEXTS = [*FIELDS, *ENDS, "", "0x1f", "-0x" + "f" * 40, "cpu", "cuda:7", "é", "worker1"]
TENSORS = [
    torch.zeros(2),
    torch.zeros(3, dtype=torch.uint8),
    torch.ones(2, 2, dtype=torch.int8),
    torch.eye(2).to_sparse(),
]


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
        kind = rng.randrange(9 if depth > 5 else 24)
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
        elif kind == 15:
            self.many(rng.choice((23, 24)), rng.randrange(4), depth)
        elif kind == 16:
            self.put(21, "I", rng.randrange(6))
        elif kind == 17:
            self.text(rng.choice(("0x1f", "-0xff", "0x" + "f" * 60, "1", "z", "")), tag=22)
        else:
            self.object(depth)

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

    def object(self, depth: int) -> None:
        """Kind and parts of an object; the parts are those of the kind most of the time."""
        rng = self.rng
        kind = rng.choice((*KINDS, *("object", "member", "flags", "exception", "global", "array") * 4))
        at = len(self.bytes)
        count = 0

        def part(write: "typing.Callable[[], None]") -> None:
            nonlocal count
            write()
            count += 1

        if kind in plain_objects._MAKERS_OF_CLASSES and kind not in ("constant", "ScriptFunction"):
            module, _, name = rng.choice(NAMES).rpartition(".")
            part(lambda: self.text(module))
            part(lambda: self.text(name))
        if kind == "object":
            part(lambda: self.fields(depth))
            contents = rng.choice(([], [9], [11], [5], [0, 11], [0, 9], [10], [23]))
            for tag in contents:
                part(lambda tag=tag: self.contents(tag, depth))
        elif kind == "exception":
            part(lambda: self.many(10, rng.randrange(3), depth))
            part(lambda: self.fields(depth))
            part(lambda: self.fields(depth))
        elif kind == "member":
            part(lambda: self.text(rng.choice(("RED", "BLUE", "value"))))
        elif kind == "array":
            part(lambda: self.text(rng.choice(ENDS)))
            part(lambda: self.many(10, rng.randrange(3), 9))
            part(lambda: self.put(rng.choice((1, 2))))
            part(lambda: self.contents(rng.choice((7, 8)), depth))
        elif kind in standard_kinds.MAKERS and (kinds := standard_kinds.MAKERS[kind].kinds) is not None:
            for each in kinds:
                tag = {int: 3, str: 6, bytes: 7, torch.Tensor: 8, torch.dtype: 13, tuple: 10, bool: 1}.get(each)
                part(lambda tag=tag: self.contents(tag, depth) if tag and rng.random() < 0.9 else self.value(depth + 1))
        elif kind != "global":
            for _ in range(rng.choice((1, 1, 2, 3, 4, 5, 6, 9))):
                part(lambda: self.contents(rng.choice((3, 3, 6, 8)), depth))
        head = struct.pack("<BH", 20, len(kind)) + kind.encode() + struct.pack("<I", count)
        self.bytes[at:at] = head

    def contents(self, tag: int, depth: int) -> None:
        """A value that has that tag."""
        rng = self.rng
        if tag in (0, 1, 2):
            self.put(tag)
        elif tag == 3:
            self.put(3, "q", rng.choice((0, 1, 2, 3, 30, 2026, -1, 2**62)))
        elif tag in (5, 6):
            self.text(rng.choice(TEXTS))
        elif tag == 7:
            data = rng.randbytes(rng.choice((0, 1, 4, 8, 24)))
            self.put(7, "Q", len(data))
            self.bytes += data
        elif tag == 8:
            self.put(8, "I", rng.randrange(5))
        elif tag == 13:
            self.put(13, "B", rng.randrange(30))
        elif tag == 11:
            self.fields(depth)
        else:
            self.many(tag, rng.randrange(4), depth)

    def result(self) -> bytes:
        self.value()
        return bytes(self.bytes)


def changed(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(out))
        change = rng.randrange(4)
        if change == 0:
            out[at] = rng.randrange(26)  # a tag
        elif change == 1:
            out[at] = rng.randrange(256)
        elif change == 2:
            out[at:at] = rng.randbytes(rng.choice((1, 4, 8)))
        else:
            del out[at : at + rng.choice((1, 4, 8))]
            out = out or bytearray(b"\0")
    return bytes(out)


def make(rng: random.Random, corpus: list[bytes]) -> bytes:
    data = changed(rng.choice(corpus), rng) if rng.random() < 0.4 else Value(rng).result()
    return changed(data, rng) if rng.random() < 0.05 else data


def read(data: bytes) -> str:
    allowed = ALLOWED if len(data) % 2 else None  # a worker with pickle="off" may have no list
    return watching.outcome_of(lambda: _C._decode_objects(data, allowed, TENSORS), may_raise=b"canaries" in data)


def samples() -> list[bytes]:
    """Values that are allowed."""
    values = [
        {"a": [1, 2.5, None], (1, 2): {3, 4}},
        canaries.Listed([1, 2]),
        [canaries.Color.RED, canaries.Access.READ | canaries.Access.WRITE],
        [fractions.Fraction(1, 3), decimal.Decimal("1.5"), uuid.UUID(int=5), datetime.datetime(2026, 1, 1)],
        collections.OrderedDict(a=collections.deque([1, 2], 3)),
        [collections.defaultdict(list, a=[1]), canaries.OwnList([1]), canaries.OwnDict(a=1), canaries.OwnStr("a")],
        [torch.float32, torch.device("cpu"), torch.Size([1, 2]), torch.strided, ..., int],
        [Path("a/b"), range(3), slice(1, 2), bytearray(b"x"), frozenset({1}), complex(1, 2), 2**100],
        [np.arange(3), np.float32(1), np.dtype("i4"), np.array(["a", "b"])],
        [ValueError("a"), canaries.OwnError("b"), datetime.timezone.utc, datetime.timedelta(1)],
    ]
    canaries.touched.clear()
    return [_C._encode_objects(value, None) for value in values]


if __name__ == "__main__":
    corpus = [bytes((0,)), *samples(), *(Value(random.Random(seed)).result() for seed in range(30))]
    sys.exit(watching.main(__doc__, "objects", corpus, make, read))
