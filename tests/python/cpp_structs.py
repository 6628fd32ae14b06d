"""The dataclasses of cpp_group.py, which is imported twice: as a program and as a module."""

import dataclasses

import torch

from torchrpc import cpp_struct


@cpp_struct
@dataclasses.dataclass(frozen=True)
class Point:
    x: float
    y: float  # C++'s Point has one more


@cpp_struct(name="geometry.Shape")
@dataclasses.dataclass
class Shape:
    name: str
    corners: list
    marks: dict
    center: object = None
    blob: bytes = b""
    weight: torch.Tensor | None = None
    color: int = 1
    comment: str = "none"  # C++'s Shape does not have it


@cpp_struct(name="unknown")
@dataclasses.dataclass
class Unknown:
    value: int = 1
