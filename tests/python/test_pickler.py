"""The pickler without a group: objects to bytes and tensors, and back."""

import functools
import pickle
import sys
import threading
from collections import namedtuple

import numpy as np
import pytest
import torch

from torchrpc.rpc import NameNotFoundError, internal
from torchrpc.rpc._values.pickler import _OUT_OF_BAND_BYTES, _function, raise_unsendable

Pair = namedtuple("Pair", "first second")
GLOBAL = 100


def round_trip(obj):
    return internal.deserialize(*internal.serialize(obj))


def double(x):
    return 2 * x


def add_global(x):
    return x + GLOBAL


class Owner:
    def __init__(self, value):
        self.value = value

    def method(self, x):
        return self.value + x

    @staticmethod
    def static(x):
        return -x


class Nested:
    """Uses the pickler while it is being pickled."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __getstate__(self):
        return internal._internal_rpc_pickler.serialize((self.tensor, self.tensor + 1))

    def __setstate__(self, state):
        self.tensor, self.next = internal._internal_rpc_pickler.deserialize(*state)


def test_tensors_travel_beside_the_bytes():
    a, b = torch.rand(1000), torch.rand(3)
    data, tensors = internal.serialize({"a": a, "pair": Pair(b, a)})
    assert [t is u for t, u in zip(tensors, (a, b), strict=True)] == [True, True]
    assert len(data) < 500
    back = internal.deserialize(data, tensors)
    assert back["a"] is a and back["pair"] == Pair(b, a)


def test_parameters_keep_their_class():
    back = round_trip(torch.nn.Parameter(torch.ones(3)))
    assert isinstance(back, torch.nn.Parameter) and back.requires_grad and torch.equal(back, torch.ones(3))


def test_nested_use_does_not_mix_the_tensors():
    outer = torch.zeros(2)
    back = round_trip([Nested(torch.ones(3)), outer])
    assert torch.equal(back[0].tensor, torch.ones(3)) and torch.equal(back[0].next, torch.full((3,), 2.0))
    assert back[1] is outer


def test_large_buffers_travel_without_a_copy_and_arrive_writable():
    array = np.arange(_OUT_OF_BAND_BYTES, dtype=np.float64)
    small = np.arange(3)
    data, tensors = internal.serialize([torch.ones(1), array, small])
    assert len(tensors) == 2 and tensors[1].data_ptr() == array.ctypes.data
    arrived = tensors[1].clone()
    back = internal.deserialize(data, [tensors[0], arrived])
    assert np.array_equal(back[1], array) and np.array_equal(back[2], small)
    back[1][0] = 7.0
    assert arrived[:8].numpy().view(np.float64)[0] == 7.0


def test_read_only_and_fortran_arrays_arrive_equal():
    frozen = np.arange(10_000)
    frozen.flags.writeable = False
    columns = np.asfortranarray(np.arange(10_000).reshape(100, 100))
    back = round_trip([frozen, columns])
    assert np.array_equal(back[0], frozen) and np.array_equal(back[1], columns)
    assert back[1].flags.f_contiguous and back[1].flags.writeable


def test_a_bytearray_arrives_equal():
    data = bytearray(range(256)) * 100
    assert round_trip(data) == data and round_trip(pickle.PickleBuffer(data)) == data


def test_named_functions_travel_by_name():
    for function in (double, Owner.static, Owner.method, len, torch.add):
        assert round_trip(function) is function
    assert round_trip(Owner(3).method)(4) == 7


def test_a_lambda_travels_as_code():
    k = 5
    sent = lambda x, y=2, *, z=3: (x + y + z + k) * GLOBAL  # noqa: E731
    back = round_trip(sent)
    assert back is not sent and back(1) == sent(1) == 1100
    assert back.__defaults__ == (2,) and back.__kwdefaults__ == {"z": 3} and back.__globals__ is globals()


def test_a_closure_is_sent_by_value():
    values = [1]

    def total():
        return sum(values)

    back = round_trip(total)
    values.append(2)
    assert (total(), back()) == (3, 1)
    assert back.__qualname__ == total.__qualname__ and back.__module__ == __name__


def test_functions_may_refer_to_themselves_and_to_each_other():
    def factorial(n):
        return 1 if n < 2 else n * factorial(n - 1)

    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    assert round_trip(factorial)(10) == 3628800
    assert round_trip(even)(10) is True and round_trip(odd)(10) is False


def test_functions_that_share_a_cell_still_share_it():
    count = 0

    def up():
        nonlocal count
        count += 1

    def read():
        return count

    up_there, read_there = round_trip((up, read))
    up_there()
    assert (read_there(), count) == (1, 0)


def test_a_cell_without_a_value_arrives_empty():
    def outer():
        def inner():
            return later

        sent = round_trip(inner)
        later = 1
        return inner(), sent

    value, sent = outer()
    assert value == 1
    with pytest.raises(NameError):
        sent()


def test_a_function_keeps_attributes_annotations_and_tensors():
    def annotated(x: int, scale: torch.Tensor = torch.ones(1)) -> float:  # noqa: B008
        """Documented."""
        return x * scale

    annotated.mark = Pair(1, 2)
    data, tensors = internal.serialize(annotated)
    assert len(tensors) == 1
    back = internal.deserialize(data, tensors)
    assert back.mark == Pair(1, 2) and back.__doc__ == "Documented."
    assert back.__annotations__ == {"x": int, "scale": torch.Tensor, "return": float}


def test_an_async_execution_lambda_keeps_its_marker():
    from torchrpc.rpc.functions import async_execution

    back = round_trip(async_execution(lambda x: x + 1))
    assert back(1) == 2 and back._wrapped_async_rpc_function(1) == 2


def test_partials_and_lambdas_in_containers_work():
    assert round_trip(functools.partial(lambda a, b: a - b, 10))(3) == 7
    assert [f(2) for f in round_trip([lambda x: x, double])] == [2, 4]


def test_a_wrapped_function_is_not_confused_with_its_wrapper():
    original = vars(_wrapped_target)["__wrapped__"]
    assert round_trip(original)(1) == 11 and round_trip(_wrapped_target) is _wrapped_target


def _wrap(fn):
    return functools.wraps(fn)(lambda x: -fn(x))


@_wrap
def _wrapped_target(x):
    return x + 10


def test_script_modules_travel():
    module = torch.jit.script(torch.nn.Linear(2, 3))
    x = torch.rand(1, 2)
    (back,) = round_trip([module])
    assert torch.equal(back(x), module(x))


def test_code_of_another_python_is_refused():
    with pytest.raises(RuntimeError, match="arrived as code of cpython-27"):
        _function(b"", "cpython-27", __name__, "f", ())


def test_a_missing_function_is_named_with_a_remedy(monkeypatch):
    data, tensors = internal.serialize([double])
    monkeypatch.delattr(sys.modules[__name__], "double")
    with pytest.raises(NameNotFoundError, match="Default RPC pickler does not serialize") as raised:
        internal.deserialize(data, tensors)
    assert isinstance(raised.value, AttributeError) and isinstance(raised.value, RuntimeError)
    assert "no double in its module test_pickler" in str(raised.value)


def test_a_missing_module_is_named_with_a_remedy():
    data, tensors = internal.serialize(double)
    with pytest.raises(NameNotFoundError, match="cannot import the module test_missing") as raised:
        internal.deserialize(data.replace(b"test_pickler", b"test_missing"), tensors)
    assert isinstance(raised.value, ModuleNotFoundError)


def test_main_and_mp_main_are_the_same_module(monkeypatch):
    from torchrpc.rpc._values.names import find_global

    monkeypatch.setattr(sys.modules["__main__"], "only_here", 42, raising=False)
    assert find_global("__mp_main__", "only_here") == find_global("__main__", "only_here") == 42


def test_a_value_that_cannot_be_sent_is_named():
    lock = threading.Lock()
    with pytest.raises(TypeError) as raised:
        internal._internal_rpc_pickler.serialize(internal.PythonUDF(double, (1, lock), {}))
    with pytest.raises(TypeError) as improved:
        raise_unsendable(raised.value, "worker7", double, (1, lock), {})
    for part in ("argument 1 (lock)", "call of double to worker7", "cannot pickle '_thread.lock'", "rpc.remote()"):
        assert part in str(improved.value)


def test_a_result_that_cannot_be_sent_is_an_error():
    with pytest.raises(TypeError, match=r"cannot send a value of type lock: .*rpc\.remote\(\)"):
        internal.serialize(threading.Lock())


def test_a_future_is_refused():
    with pytest.raises(RuntimeError, match=r"Can not pickle torch.futures.Future"):
        internal.serialize([torch.futures.Future()])


def test_registered_reducers_are_used_for_their_class_only():
    class Special:
        pass

    pickler = internal._InternalRPCPickler()
    pickler._register_reducer(Special, lambda obj: (int, (7,)))
    assert pickler.deserialize(*pickler.serialize([Special(), Pair(1, 2)])) == [7, Pair(1, 2)]


def test_pickling_leaves_no_cycle_that_keeps_tensors(recwarn):
    import gc
    import weakref

    gc.disable()
    try:
        tensor = torch.ones(4)
        alive = weakref.ref(tensor)
        data, tensors = internal.serialize([tensor, lambda: 1])
        internal.deserialize(data, tensors)
        del tensor, tensors
        assert alive() is None
    finally:
        gc.enable()
