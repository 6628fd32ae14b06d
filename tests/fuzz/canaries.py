"""Classes and functions for the fuzzer of what Python reads. What an input may not call notes it in `touched`."""

import dataclasses
import enum
import typing

touched: list[str] = []


class Watched(type):
    """A metaclass, whose calls would be the work of a pickle."""

    def __call__(cls, *args, **kwargs):
        touched.append(f"{cls.__name__}()")

    def __getattr__(cls, name):
        touched.append(f"{cls.__name__}.{name}")
        raise AttributeError(name)


class Unlisted(metaclass=Watched):
    def __new__(cls, *args, **kwargs):
        touched.append("Unlisted.__new__")

    def __setstate__(self, state):
        touched.append("Unlisted.__setstate__")

    @classmethod
    def make(cls, *args):
        touched.append("Unlisted.make")


class Impostor(metaclass=Watched):
    """Claims the name of a class that is listed."""


Impostor.__qualname__ = "Listed"


def unlisted(*args, **kwargs):
    touched.append("unlisted")


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Listed:
    value: object = None

    def method(self, *args):
        touched.append("Listed.method")

    @property
    def watched(self):
        touched.append("Listed.watched")

    @watched.setter
    def watched(self, value):
        touched.append("Listed.watched = ...")


class Slotted:
    __slots__ = ("left", "right")


class WithState:
    def __setstate__(self, state):
        touched.append("WithState.__setstate__")


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class OwnList(list):
    def __init__(self, *args):
        list.__init__(self, *args)
        touched.append("OwnList()")

    def extend(self, items):
        touched.append("OwnList.extend")


class OwnDict(dict):
    def __setitem__(self, key, value):
        touched.append("OwnDict[...] = ...")

    def update(self, *args, **kwargs):
        touched.append("OwnDict.update")


class OwnStr(str):
    def __new__(cls, *args):
        touched.append("OwnStr()")
        return str.__new__(cls, *args)


class OwnError(Exception):
    def __init__(self, *args):
        touched.append("OwnError()")


def listed(*args):
    touched.append("listed")


SHARED = Listed("shared")
LISTED = (Listed, Slotted, WithState, Color, Access, OwnList, OwnDict, OwnStr, OwnError, listed)


# --- Registered by the fuzzer ---


class Registered:
    def __init__(self):
        touched.append("Registered()")

    def __setattr__(self, name, value):
        touched.append(f"Registered.{name} = ...")


class Pair(typing.NamedTuple):
    first: object
    second: object


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: object
    made: int = dataclasses.field(init=False, default=1)

    def __post_init__(self):
        if isinstance(self.value, str):
            raise ValueError("no string")
