"""References to values on other workers, and calls of their methods."""

import functools
import gc
import re
import threading
import time

import pytest
import torch
from waiting import eventually

import torchrpc
import torchrpc.rpc as rpc
from torchrpc.testing import workers


@pytest.fixture(scope="module", autouse=True)
def group():
    with workers(3) as names:
        yield names


class Box:
    def __init__(self, value):
        self.value = value

    def get(self):
        return self.value

    def add(self, other, *, times=1):
        self.value = self.value + other * times
        return self.value

    def slow(self, seconds):
        time.sleep(seconds)  # the function under test is slow
        return self.value

    @rpc.functions.async_execution
    def add_later(self, to, other):
        return rpc.rpc_async(to, torch.add, args=(self.value, other)).then(lambda fut: fut.wait() + 1)

    @classmethod
    @rpc.functions.async_execution
    def class_later(cls, to, a, b):
        return rpc.rpc_async(to, torch.add, args=(a, b))

    @staticmethod
    @rpc.functions.async_execution
    def static_later(to, a, b):
        return rpc.rpc_async(to, torch.add, args=(a, b))

    def fail(self):
        raise KeyError("boxed")


def to_here(rref):
    return rref.to_here()


def owner_of(rref):
    return rref.owner_name(), rref.is_owner(), rref.confirmed_by_owner()


def make_rref(to, value):
    return rpc.remote(to, Box, (value,))


def isinstance_there(rref):
    return isinstance(rref, rpc.RRef)


@functools.singledispatch
def describe(_):
    return "an object"


@describe.register
def _(_: rpc.RRef):
    return "a reference"


_told = threading.Event()


def box_when_told(value):
    assert _told.wait(60)
    _told.clear()
    return Box(value)


def tell():
    _told.set()


def debug_info():
    return {key: int(value) for key, value in rpc._rref_context_get_debug_info().items()}


def test_a_local_reference_holds_the_value_itself():
    value = Box(1)
    rref = rpc.RRef(value)
    assert rref.is_owner() and rref.confirmed_by_owner() and rref.owner() == rpc.get_worker_info()
    assert rref.local_value() is value and rref.to_here() is value
    assert rref.rpc_sync().get() == 1


def test_a_remote_reference_has_its_owner_and_fetches_the_value():
    rref = rpc.remote("worker1", torch.add, (torch.ones(2), 1))
    assert rref.owner().name == rref.owner_name() == "worker1" and not rref.is_owner()
    assert torch.equal(rref.to_here(), torch.full((2,), 2.0))
    assert torch.equal(rref.to_here(timeout=5), torch.full((2,), 2.0))
    with pytest.raises(RuntimeError, match=r"can't call localValue\(\) on user"):
        rref.local_value()


def test_references_travel_in_calls_results_and_containers():
    rref = rpc.remote("worker1", Box, (5,))
    assert rpc.rpc_sync("worker2", owner_of, (rref,)) == ("worker1", False, True)
    assert rpc.rpc_sync("worker1", owner_of, (rref,)) == ("worker1", True, True)
    assert rpc.rpc_sync("worker2", lambda box: box["r"][0].rpc_sync().get(), ({"r": [rref]},)) == 5
    back = rpc.rpc_sync("worker2", make_rref, ("worker1", 6))
    assert back.owner_name() == "worker1" and back.rpc_sync().get() == 6
    mine = rpc.RRef(torch.ones(1))
    assert torch.equal(rpc.rpc_sync("worker1", to_here, (mine,)), torch.ones(1))
    assert rpc.remote("worker2", to_here, (rpc.remote("worker1", int, (3,)),)).to_here() == 3


def test_a_reference_to_a_reference_works():
    outer = rpc.remote("worker1", make_rref, ("worker2", 9))
    assert outer.to_here().rpc_sync().get() == 9


def test_methods_can_be_called_in_three_ways():
    rref = rpc.remote("worker1", Box, (1,))
    assert rref.rpc_sync().add(2) == 3
    assert rref.rpc_async().add(1, times=3).wait() == 6
    assert rref.remote().add(4).to_here() == 10
    assert rpc.rpc_sync("worker1", Box.get, (Box(3),)) == 3


def test_async_methods_can_be_called_in_three_ways():
    one = torch.ones(1)
    rref = rpc.remote("worker1", Box, (one,))
    assert rref.rpc_sync().add_later("worker2", 1) == 3
    assert rref.rpc_async().add_later("worker2", 1).wait() == 3
    assert rref.remote().add_later("worker2", 1).to_here() == 3
    assert rref.rpc_sync().class_later("worker2", one, 1) == 2
    assert rref.rpc_async().static_later("worker2", one, 1).wait() == 2


def test_methods_of_a_tensor_can_be_called():
    rref = rpc.remote("worker1", torch.add, (torch.ones(2, 2), 1))
    assert rref.rpc_sync().size() == torch.Size([2, 2])
    assert torch.equal(rref.rpc_async().view(1, 4).wait(), torch.full((1, 4), 2.0))


def test_a_missing_method_is_an_attribute_error():
    rref = rpc.remote("worker1", Box, (1,))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        rref.rpc_sync().nothing()
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        rref.rpc_async().nothing().wait()
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        rref.remote().nothing()


def test_a_failing_method_raises_here():
    with pytest.raises(KeyError, match="boxed"):
        rpc.remote("worker1", Box, (1,)).rpc_sync().fail()


def test_rpc_async_of_a_reference_is_asynchronous():
    rref = rpc.remote("worker1", box_when_told, (5,))
    future = rref.rpc_async().get()
    assert not future.done()
    rpc.rpc_sync("worker1", tell)
    assert future.wait() == 5


def test_the_type_of_the_value_is_available():
    rref = rpc.remote("worker1", Box, (1,))
    assert rref._get_type() is Box and rref._get_type(blocking=False).wait() is Box
    assert rpc.RRef(3)._get_type() is int


def test_timeouts_apply_to_references():
    slow = rpc.remote("worker1", box_when_told, (5,))
    for limited in (
        lambda: slow.to_here(timeout=0.05),
        lambda: slow.rpc_sync(timeout=0.05).get(),
        lambda: slow.rpc_async(timeout=0.05).get().wait(),
        lambda: slow._get_type(timeout=0.05),
    ):
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            limited()
    rpc.rpc_sync("worker1", tell)
    assert slow.to_here().value == 5


def test_an_error_of_the_function_is_raised_at_each_use():
    rref = rpc.remote("worker1", int, ("x",))
    for _ in range(2):
        with pytest.raises(ValueError, match="invalid literal"):
            rref.to_here()


def test_references_are_not_pickled_outside_a_call(tmp_path):
    with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler"):
        torch.save(rpc.RRef(1), tmp_path / "x")


def test_references_print_and_are_generic():
    assert str(rpc.RRef(1)).startswith("OwnerRRef(GloballyUniqueId(created_on=0, local_id=")
    assert str(rpc.remote("worker1", int)).startswith("UserRRef(")
    assert rpc.RRef[int].__origin__ is rpc.RRef
    assert isinstance(rpc.RRef(1), rpc.PyRRef)


def test_each_reference_is_an_instance_of_the_public_class():
    mine, theirs = rpc.RRef(1), rpc.remote("worker1", int, (2,))
    received = rpc.rpc_sync("worker2", make_rref, ("worker1", 6))
    torchrpc.register("an instance", theirs)
    found = torchrpc.lookup("an instance")
    torchrpc.unregister("an instance")
    held = torchrpc.supervise(Box, ["worker1"], (1,)).rref()
    for rref in (mine, theirs, received, found, held):
        assert isinstance(rref, rpc.RRef) and issubclass(type(rref), torchrpc.RRef)
    assert rpc.rpc_sync("worker1", isinstance_there, (mine,)) and rpc.rpc_sync("worker1", isinstance_there, (theirs,))
    assert not isinstance(1, rpc.RRef) and not issubclass(int, rpc.RRef)

    class Named(rpc.RRef):
        pass

    named = Named(3)
    assert isinstance(named, Named) and isinstance(named, rpc.RRef) and issubclass(Named, rpc.RRef)
    assert not isinstance(theirs, Named) and not issubclass(rpc.RRef, Named)
    assert describe(theirs) == describe(mine) == "a reference" and describe(1) == "an object"


def test_all_workers_are_listed_by_id(group):
    assert [(info.id, info.name) for info in rpc.get_worker_infos()] == list(enumerate(group))


def test_reprs_of_references_tell_owner_type_and_state():
    assert re.fullmatch(r"RRef\(owner=worker0, type=Tensor, state=ready, id=0:\d+\)", repr(rpc.RRef(torch.ones(2))))
    rref = rpc.remote("worker1", int)
    rref.to_here()
    assert repr(rref).startswith("RRef(owner=worker1, state=confirmed, id=0:")
    rref._get_type()
    assert repr(rref).startswith("RRef(owner=worker1, type=int, state=confirmed, id=0:")
    failed = rpc.remote("worker0", int, args=("x",))
    with pytest.raises(ValueError, match="invalid literal"):
        failed.to_here()
    assert repr(failed).startswith("RRef(owner=worker0, state=failed: ")


def test_a_proxy_refuses_an_attribute_by_name():
    rref = rpc.remote("worker1", torch.ones, args=([2, 3],))
    for proxy in (rref.rpc_sync(), rref.remote()):
        with pytest.raises(TypeError, match=r"Tensor\.shape is not a method: a proxy of an RRef calls methods only"):
            result = proxy.shape()
            result.to_here()
    with pytest.raises(TypeError, match=r"Tensor\.ndim is not a method.*rref\.local_value\(\)\.ndim"):
        rref.rpc_async().ndim().wait()


def test_values_die_with_their_last_reference():
    eventually(lambda: gc.collect() is not None and rpc.rpc_sync("worker1", debug_info)["num_owner_rrefs"] == 0)
    rref = rpc.remote("worker1", Box, (1,))
    assert rref.rpc_sync().get() == 1
    assert rpc.rpc_sync("worker1", debug_info)["num_owner_rrefs"] == 1
    del rref
    eventually(lambda: rpc.rpc_sync("worker1", debug_info)["num_owner_rrefs"] == 0)


def test_debug_info_has_torchs_keys():
    assert set(debug_info()) >= {"num_owner_rrefs", "num_forks", "num_pending_users", "num_pending_futures"}
    assert rpc._get_debug_info()["agent.thread_pool_size"] == "16"
