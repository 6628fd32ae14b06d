"""Dataclasses of torchrpc.cpp_struct between Python workers; between Python and C++: test_mixed_groups.py."""

import dataclasses
import pickle

import pytest
import torch

import torchrpc
import torchrpc.rpc as rpc
from torchrpc.rpc._values import structs
from torchrpc.testing import workers


@torchrpc.cpp_struct
@dataclasses.dataclass(frozen=True)
class Place:
    x: float
    y: float = 2.0
    made: int = dataclasses.field(init=False, default=7)

    def __post_init__(self):
        if self.x < 0:
            raise ValueError("no such place")

    def __reduce__(self):
        raise pickle.PicklingError("a pickle")


@torchrpc.cpp_struct(name="tests.Route")
@dataclasses.dataclass(slots=True)
class Route:
    places: list
    weight: torch.Tensor | None = None


def echo(value):
    return value


@pytest.mark.parametrize("mode", ["on", "off"])
def test_objects_travel_without_pickle(mode):
    with workers(2, pickle=mode):
        routes = [Route([Place(float(i)) for i in range(100)], torch.ones(2)), Route([])]
        arrived = rpc.rpc_sync("worker1", echo, args=({"routes": routes},))["routes"]
        assert [place.x for place in arrived[0].places] == [float(i) for i in range(100)]
        assert arrived[0].places[5].made == 7 and torch.equal(arrived[0].weight, torch.ones(2))
        assert arrived[1] == Route([])
        # One with a value that is no plain data.
        if mode == "off":
            assert rpc.rpc_sync("worker1", echo, args=(Route([{1, 2}]),)) == Route([{1, 2}])


def test_large_integers_and_long_lists_of_containers_travel_as_plain_data():
    with workers(2):
        for value in (2**63, 2**64 - 1, [[i] for i in range(1000)], [(), ()] * 100, -(2**64), 2**64):
            assert rpc.rpc_sync("worker1", echo, args=(value,)) == value
        shared = [1]
        arrived = rpc.rpc_sync("worker1", echo, args=([shared] * 3 + [[i] for i in range(100)] + [shared],))
        assert arrived[0] is arrived[-1]  # pickled, because it occurs twice


def test_fields_may_be_added_and_not_be_renamed():
    assert structs.make_struct("Place", {"x": 1.0, "y": 2.0, "made": 7, "later": 3}) == Place(1.0)
    assert structs.make_struct("Place", {"x": 1.0}).y == 2.0
    with pytest.raises(rpc.SerializationError, match=r"has no field x, for which Place on .* has no default"):
        structs.make_struct("Place", {"y": 1.0})
    with pytest.raises(rpc.SerializationError, match=r"unknown on .* \(z\) and lacks others \(y, made\)"):
        structs.make_struct("Place", {"x": 1.0, "z": 1.0})


def test_what_arrives_is_checked_by_the_constructor():
    with pytest.raises(ValueError, match="no such place"):
        structs.make_struct("Place", {"x": -1.0})


def test_an_unknown_struct_says_what_to_do():
    with pytest.raises(
        rpc.SerializationError, match=r"knows no dataclass for the struct Nowhere: decorate one .*cpp_struct"
    ):
        structs.make_struct("Nowhere", {})


def test_wrong_uses_are_refused():
    with pytest.raises(TypeError, match="takes a dataclass"):
        torchrpc.cpp_struct(int)
    with pytest.raises(TypeError, match="must be a str"):
        torchrpc.cpp_struct(name=3)
    with pytest.raises(ValueError, match="is empty"):
        torchrpc.cpp_struct(name="")(Place)

    @dataclasses.dataclass
    class Other:
        pass

    with pytest.raises(ValueError, match="is the struct Place already"):
        torchrpc.cpp_struct(name="Place")(Other)
    assert torchrpc.cpp_struct(Place) is Place  # a module that is loaded again
