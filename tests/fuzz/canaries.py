"""Classes and functions for the fuzzers of what Python reads. What an input may not call notes it in `touched`."""

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
        self.state = state


def listed(*args):
    """May be called, and returns what the worker shares."""
    return SHARED


SHARED = Listed("shared")
LISTED = (Listed, Slotted, WithState, Color, listed)


# --- For plain_objects.py, which registers them ---


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
