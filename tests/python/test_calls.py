"""Calls of every kind of callable with every kind of payload, in one group of three workers."""

import operator
import pickle
import random
import threading
import weakref
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch

import torchrpc.rpc as rpc
from torchrpc.testing import workers

Point = namedtuple("Point", "x y")
GLOBAL = 7
SEEN = []


@pytest.fixture(scope="module", autouse=True)
def group():
    with workers(3) as names:
        yield names


def identity(x):
    return x


def same_object(a, b):
    return a is b


def indices_of_first_aliases(values):
    """Return, for each tensor, the index of the first one that shares its memory."""
    addresses = [value.data_ptr() for value in values]
    return [addresses.index(address) for address in addresses]


def survives_the_arguments(tensors):
    seen = [weakref.ref(tensor) for tensor in tensors]
    tensors.clear()
    return [tensor() is not None for tensor in seen]


def add(a, b=10, *, c=0):
    return a + b + c


def my_name():
    return rpc.get_worker_info().name


def mutate(values):
    values.append(1)
    return values


def call_onwards(to, function, *args):
    return rpc.rpc_sync(to, function, args=args)


def remember(value):
    SEEN.append(value)
    return len(SEEN)


def set_global(value):
    global GLOBAL
    GLOBAL = value


class Counter:
    def __init__(self, start=0):
        self.count = start

    def add(self, n):
        self.count += n
        return self.count

    @classmethod
    def made(cls, start):
        return cls(start).count

    @staticmethod
    def static(x):
        return -x


def equal(a, b):
    if isinstance(a, torch.Tensor):
        if a.layout != b.layout or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(a.to_dense(), b.to_dense()) if a.layout != torch.strided else torch.equal(a, b)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else type(a) is type(b) and a == b


TENSORS = {
    "float": torch.rand(3, 4),
    "scalar": torch.tensor(2.5),
    "zero-size": torch.empty(0, 5),
    "strided": torch.rand(10, 10)[::2, 1::3],
    "transposed": torch.rand(4, 6).t(),
    "expanded": torch.rand(1, 4).expand(3, 4),
    "bfloat16": torch.rand(5).bfloat16(),
    "half": torch.rand(5).half(),
    "bool": torch.tensor([True, False]),
    "complex": torch.rand(3, dtype=torch.complex64),
    "int8": torch.arange(100, dtype=torch.int8),
    "sparse": torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [3.0, 4.0, 5.0], (2, 3)),
    "coalesced": torch.sparse_coo_tensor([[0, 1], [2, 0]], [3.0, 4.0], (2, 3)).coalesce(),
    "csr": torch.eye(4).to_sparse_csr(),
    "4 MiB": torch.arange(1 << 20, dtype=torch.float32),
}
PLAIN = [
    None,
    True,
    -(2**63),
    2**100,
    0.1,
    float("inf"),
    "",
    "é漢\U0001f600",
    b"\x00\xff",
    (),
    [],
    {},
    (1, [2, {"a": b"b"}]),
    3 + 4j,
]
OBJECTS = [
    Point(1, 2),
    {1, 2},
    OrderedDict(a=1),
    slice(1, 2),
    torch.float64,
    torch.device("cpu"),
    np.arange(10_000),
    ValueError,
]


@pytest.mark.parametrize("kind", TENSORS)
def test_every_tensor_arrives_equal(kind):
    sent = TENSORS[kind]
    assert equal(rpc.rpc_sync("worker1", identity, (sent,)), sent)
    assert equal(rpc.rpc_sync("worker1", identity, ({"point": Point(sent, 1)},))["point"].x, sent)


@pytest.mark.parametrize("value", PLAIN + OBJECTS, ids=repr)
def test_every_value_arrives_equal(value):
    assert equal(rpc.rpc_sync("worker1", identity, (value,)), value)


@pytest.mark.parametrize("kind", [k for k in TENSORS if TENSORS[k].layout == torch.strided and k not in ("bool",)])
def test_operators_run_remotely(kind):
    sent = TENSORS[kind]
    assert equal(rpc.rpc_sync("worker1", torch.add, args=(sent, sent)), torch.add(sent, sent))


def test_operators_accept_defaults_keywords_and_lists():
    x = torch.rand(4, 3)
    assert torch.equal(rpc.rpc_sync("worker1", torch.sum, args=(x,), kwargs={"dim": 1}), x.sum(1))
    assert torch.equal(rpc.rpc_sync("worker1", torch.cat, args=([x, x], 1)), torch.cat([x, x], 1))
    assert torch.equal(rpc.rpc_sync("worker1", torch.add, args=(x, 1)), x + 1)
    first, second = rpc.rpc_sync("worker1", torch.split, args=(x, 2))
    assert torch.equal(first, x[:2]) and torch.equal(second, x[2:])


@pytest.mark.parametrize("function", [torch.ops.aten.add, torch.ops.aten.add.Tensor], ids=["packet", "overload"])
def test_objects_of_torch_ops_run_and_arrive(function):
    x = torch.rand(3)
    assert torch.equal(rpc.rpc_sync("worker1", function, args=(x, x)), x + x)
    assert torch.equal(rpc.remote("worker1", function, args=(x, x)).to_here(), x + x)
    assert rpc.rpc_sync("worker1", identity, args=(function,)) is function


@torch.library.custom_op("torchrpc_test_calls::scaled_by_python", mutates_args=())
def scaled_by_python(x: torch.Tensor, factor: float) -> torch.Tensor:
    assert threading.get_ident() != threading.main_thread().ident
    return x * factor


@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_an_operator_that_is_written_in_python_runs_as_an_object_of_torch_ops(to):
    x = torch.rand(3)
    operators = torch.ops.torchrpc_test_calls
    for function in (operators.scaled_by_python, operators.scaled_by_python.default):
        assert torch.equal(rpc.rpc_sync(to, function, args=(x, 2.0)), x * 2)
        assert torch.equal(rpc.rpc_sync(to, function, args=(x,), kwargs={"factor": 3.0}), x * 3)


# torch.ops.aten.empty([2], dtype=120) ends its process.
@pytest.mark.parametrize(
    ("function", "args", "options", "text"),
    [
        (torch.ops.aten.empty, ([2],), {"dtype": 120}, "dtype.*no ScalarType with the number 120"),
        (torch.ops.aten.ones.default, ([2],), {"dtype": -5}, "dtype.*no ScalarType with the number -5"),
        (torch.ops.aten.ones, ([2],), {"layout": 77}, "layout.*no Layout with the number 77"),
        (torch.ops.aten.to.dtype, (torch.ones(2), 100), {}, "dtype.*no ScalarType with the number 100"),
        (torch.ops.aten.add.Tensor, ("x", 1), {}, "Expected a value of type 'Tensor'"),
    ],
)
def test_wrong_arguments_of_objects_of_torch_ops_are_refused(function, args, options, text):
    for mode in (rpc.rpc_sync, lambda *call, **kwargs: rpc.remote(*call, **kwargs).to_here()):
        with pytest.raises(RuntimeError, match=text):
            mode("worker1", function, args=args, kwargs=options)
    assert rpc.rpc_sync("worker1", torch.add, args=(1, 2)) == 3


def test_an_object_of_torch_ops_takes_numbers_instead_of_tensors_as_in_python():
    for x in (torch.ones(2), torch.ones(2, dtype=torch.int32)):
        here = torch.ops.aten.mul.Tensor(x, 2.5)
        arrived = rpc.rpc_sync("worker1", torch.ops.aten.mul.Tensor, args=(x, 2.5))
        assert torch.equal(arrived, here) and arrived.dtype == here.dtype


def test_an_operator_with_wrong_arguments_is_refused_by_the_caller():
    with pytest.raises(RuntimeError, match="Overloaded torch operator invoked from Python failed to match any schema"):
        rpc.rpc_sync("worker1", torch.add, args=())


def test_an_operator_that_fails_on_the_callee_names_the_reason():
    with pytest.raises(RuntimeError, match="size of tensor"):
        rpc.rpc_sync("worker1", torch.add, args=(torch.rand(10), torch.rand(5)))


def test_the_three_ways_to_call_agree():
    assert rpc.rpc_sync("worker1", add, (1,), {"c": 5}) == 16
    assert rpc.rpc_async("worker1", add, (1,), {"c": 5}).wait() == 16
    assert rpc.remote("worker1", add, (1,), {"c": 5}).to_here() == 16


def test_a_worker_can_be_named_in_every_way(group):
    info = rpc.get_worker_info("worker2")
    for to in ("worker2", 2, info, np.int64(2)):
        assert rpc.rpc_sync(to, my_name) == "worker2"
    assert rpc.rpc_sync(rpc.get_worker_info(), my_name) == "worker0"
    assert [rpc.rpc_sync(name, my_name) for name in group] == group


def test_python_builtins_classes_and_methods_can_be_called():
    assert rpc.rpc_sync("worker1", min, (3, 1, 2)) == 1
    assert rpc.rpc_sync("worker1", sorted, ([3, 1],), {"reverse": True}) == [3, 1]
    assert rpc.rpc_sync("worker1", operator.mul, (6, 7)) == 42
    assert rpc.rpc_sync("worker1", Counter.made, (3,)) == 3
    assert rpc.rpc_sync("worker1", Counter.static, (3,)) == -3
    assert rpc.rpc_sync("worker1", Counter(5).add, (3,)) == 8
    assert rpc.rpc_sync("worker1", Counter, (4,)).count == 4
    assert rpc.rpc_sync("worker1", torch.einsum, ("ij->ji", torch.ones(2, 3))).shape == (3, 2)


def unmarked():
    return 1


unmarked._wrapped_async_rpc_function = None


@pytest.mark.parametrize(
    ("function", "args", "result"),
    [
        (eval, ("1 + 1",), 2),
        (eval, ("a + 1", {"a": 4}), 5),
        (exec, ("a = 1",), None),
        (dir, (), ["args", "function", "kwargs"]),
        (dir, ([],), dir([])),
        (locals, (), {"function": locals, "args": (), "kwargs": {}}),
    ],
    ids=["eval", "eval with names", "exec", "dir", "dir of an object", "locals"],
)
@pytest.mark.parametrize("worker", ["worker0", "worker1"])
def test_functions_that_look_at_the_frame_of_their_caller_can_be_called(worker, function, args, result):
    assert rpc.rpc_sync(worker, function, args) == result


def test_a_function_that_wraps_none_is_an_ordinary_one():
    assert rpc.rpc_sync("worker1", unmarked) == 1


def test_lambdas_and_closures_are_sent_as_code():
    k = torch.ones(2)
    assert torch.equal(rpc.rpc_sync("worker1", lambda x: add(x, k), (torch.ones(2),)), torch.full((2,), 2.0))

    def fibonacci(n):
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    assert rpc.rpc_async("worker1", fibonacci, (15,)).wait() == 610
    assert rpc.remote("worker1", lambda: my_name()).to_here() == "worker1"
    assert rpc.rpc_sync("worker1", lambda: lambda x: x + 1)(1) == 2


def test_globals_of_a_lambda_are_the_callees():
    rpc.rpc_sync("worker1", set_global, (1000,))
    try:
        assert rpc.rpc_sync("worker1", lambda: GLOBAL) == 1000
        assert GLOBAL == 7
    finally:
        rpc.rpc_sync("worker1", set_global, (7,))


def test_plain_and_pickled_calls_share_no_objects_with_the_caller():
    for extra in (None, Point(0, 0)):
        values = [extra]
        assert rpc.rpc_sync("worker0", mutate, (values,)) == [extra, 1]
        assert values == [extra]


def test_an_object_sent_twice_in_a_call_arrives_as_one_object():
    for shared in ([1], {"a": 1}, torch.ones(1), Point(1, 2)):
        assert rpc.rpc_sync("worker1", same_object, (shared, shared)) is True
        assert rpc.rpc_sync("worker1", same_object, (shared,), {"b": shared}) is True


def make_functions(count):
    """Make module functions function_0, function_1 … that return their numbers."""
    for number in range(count):
        name = f"function_{number}"
        globals()[name] = eval(f"lambda: {number}", {"__name__": __name__})
        globals()[name].__qualname__ = name


def test_functions_of_more_names_than_are_kept_are_found_again():
    count = 1100
    for where in (make_functions, lambda count: rpc.rpc_sync("worker1", make_functions, (count,))):
        where(count)
    for _ in range(2):
        calls = [rpc.rpc_async("worker1", globals()[f"function_{number}"]) for number in range(count)]
        assert torch.futures.wait_all(calls) == list(range(count))


def test_a_function_that_is_replaced_on_the_callee_is_called_from_then_on():
    rpc.rpc_sync("worker1", make_functions, (1,))
    make_functions(1)
    assert rpc.rpc_sync("worker1", globals()["function_0"]) == 0
    rpc.rpc_sync("worker1", exec, (f"import sys; sys.modules[{__name__!r}].function_0 = lambda: 'replaced'", {}))
    assert rpc.rpc_sync("worker1", globals()["function_0"]) == "replaced"


def test_a_tensor_repeated_in_a_long_list_arrives_as_one_tensor():
    tensors = [torch.randn(3) for _ in range(40)]
    indices = [random.randrange(40) for _ in range(200)]
    sent = [tensors[index] for index in indices]
    assert rpc.rpc_sync("worker1", indices_of_first_aliases, args=(sent,)) == [
        indices.index(index) for index in indices
    ]


@pytest.mark.parametrize("count", [1, 100])
def test_a_function_can_free_its_argument_tensors(count):
    tensors = [torch.randn(3) for _ in range(count)]
    assert rpc.rpc_sync("worker1", survives_the_arguments, args=(tensors,)) == [False] * count


def test_a_container_may_contain_itself():
    loop = [1]
    loop.append(loop)
    back = rpc.rpc_sync("worker1", identity, (loop,))
    assert back[0] == 1 and back[1] is back


def test_nested_calls_may_call_the_first_caller():
    assert rpc.rpc_sync("worker1", call_onwards, ("worker2", my_name)) == "worker2"
    assert rpc.rpc_sync("worker1", call_onwards, ("worker0", add, 1)) == 11


def test_tensors_that_require_grad_arrive_as_plain_values():
    x = torch.rand(3, requires_grad=True)
    assert torch.equal(rpc.rpc_sync("worker1", torch.mul, (x, 2)), x.detach() * 2)


def test_many_calls_at_once_each_get_their_own_answer():
    futures = [rpc.rpc_async(f"worker{1 + i % 2}", add, (i,), {"c": torch.tensor(i)}) for i in range(200)]
    assert [int(f) for f in torch.futures.wait_all(futures)] == [2 * i + 10 for i in range(200)]


def test_threads_can_call_at_once():
    results = {}

    def run(n):
        results[n] = [rpc.rpc_sync("worker1", add, (n, i)) for i in range(20)]

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [n + i for i in range(20)] for n in range(4)}


def test_several_threads_can_wait_for_the_same_future():
    seen, waited, failures = [], [], []

    def use(n):
        try:
            for i in range(n, 400, 4):
                future = rpc.rpc_async("worker1", add, (i,))
                then = future.then(lambda f: seen.append(f.value()))
                other = threading.Thread(target=lambda future=future: waited.append(future.wait()))
                other.start()
                assert future.wait() == i + 10
                then.wait()
                other.join()
                with pytest.raises(ZeroDivisionError):
                    rpc.rpc_async("worker2", operator.truediv, (i, 0)).wait()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sorted(seen) == sorted(waited) == list(range(10, 410))


def test_calls_run_once():
    before = rpc.rpc_sync("worker1", remember, (0,))
    for _ in range(10):
        rpc.rpc_sync("worker1", remember, (0,))
    assert rpc.rpc_sync("worker1", remember, (0,)) == before + 11


def test_all_gather_and_barrier_synchronize_all_workers():
    others = [rpc.rpc_async(f"worker{rank}", rpc.api._all_gather, (rank,)) for rank in (1, 2)]
    expected = {"worker0": 0, "worker1": 1, "worker2": 2}
    assert rpc.api._all_gather(0) == expected
    assert [f.wait() for f in others] == [expected, expected]
    pair = ["worker0", "worker2"]
    other = rpc.rpc_async("worker2", rpc.api._barrier, (pair,))
    rpc.api._barrier(pair)
    other.wait()


def test_all_gather_names_the_missing_worker():
    with pytest.raises(RuntimeError, match=r"timed out in _all_gather after 0\.20 seconds, waiting for .*worker1"):
        rpc.api._all_gather(0, {"worker0", "worker1"}, timeout=0.2)


def test_wait_all_waits_for_the_calls_of_its_block():
    with rpc.api._wait_all():
        future = rpc.rpc_async("worker1", add, (1,))
        assert rpc.api._thread_local_var.future_list == [future]
    assert future.done() and not hasattr(rpc.api._thread_local_var, "future_list")
    with pytest.raises(ZeroDivisionError), rpc.api._wait_all():
        rpc.rpc_async("worker1", operator.truediv, (1, 0))


def test_the_pickler_can_be_replaced_for_a_block():
    class Counting(type(rpc.internal._internal_rpc_pickler)):
        calls = 0

        def serialize(self, obj):
            Counting.calls += 1
            return super().serialize(obj)

    with rpc.api._use_rpc_pickler(Counting()):
        assert rpc.rpc_sync("worker1", identity, (Point(1, 2),)) == Point(1, 2)
    assert Counting.calls == 1
    assert rpc.api._default_pickler is rpc.internal._internal_rpc_pickler


@pytest.mark.parametrize("api", [rpc.rpc_sync, rpc.rpc_async, rpc.remote], ids=lambda f: f.__name__)
def test_invalid_calls_are_refused_at_once(api):
    for arguments, kind, text in [
        (("worker1", 5), TypeError, "function should be callable."),
        (("worker1", add, 5), TypeError, "args must be a tuple or a list"),
        (("worker1", add, torch.ones(2)), TypeError, "but is a Tensor"),
        (("worker1", add, (1,), [1]), TypeError, "kwargs must be a dict"),
        (("worker1", add, (1,), {}, "1"), TypeError, "timeout must be a number of seconds"),
        (("worker1", add, (1,), {}, -2), ValueError, "timeout must not be negative"),
        (("worker1", add, (1,), {}, float("nan")), ValueError, "timeout"),
        ((1.5, add, (1,)), ValueError, "Cannot get WorkerInfo from name 1.5"),
        ((None, add, (1,)), ValueError, "Cannot get WorkerInfo from name None"),
        (("nobody", add, (1,)), RuntimeError, "could not find destination"),
        ((17, add, (1,)), RuntimeError, "could not find destination"),
        ((-1, add, (1,)), RuntimeError, "could not find destination"),
    ]:
        with pytest.raises(kind, match=text):
            api(*arguments)


@pytest.mark.parametrize("api", [rpc.rpc_sync, rpc.rpc_async, rpc.remote], ids=lambda f: f.__name__)
def test_an_argument_that_cannot_be_sent_is_named(api):
    with pytest.raises(TypeError, match=r"argument 1 \(lock\) of the call of add to worker1: cannot pickle"):
        api("worker1", add, (1, threading.Lock()))
    with pytest.raises(TypeError, match=r"argument b \(lock\)"):
        api("worker1", add, (1,), {"b": threading.Lock()})
    with pytest.raises(RuntimeError, match=r"Can not pickle torch.futures.Future"):
        api("worker1", identity, (torch.futures.Future(),))
    assert rpc.rpc_sync("worker1", add, (1,)) == 11


def test_functions_of_the_extension_can_be_sent():
    assert rpc.rpc_sync("worker1", rpc.get_rpc_timeout) == rpc.get_rpc_timeout()
    assert pickle.loads(pickle.dumps(rpc.get_rpc_timeout)) is rpc.get_rpc_timeout


@pytest.mark.parametrize("number", [-5, -1, 100, 120, 127, 256])
def test_a_dtype_a_layout_or_a_memory_format_that_torch_does_not_have_is_named(number):
    for function, args, name in (
        (torch.ones, ([2],), "dtype"),
        (torch.zeros, ([2],), "layout"),
        (torch.clone, (torch.ones(2),), "memory_format"),
        (torch.sum, (torch.ones(2),), "dtype"),
    ):
        words = rf"argument '{name}' of aten::{function.__name__}: there is no \w+ with the number {number}"
        for to in ("worker0", "worker1"):
            with pytest.raises(RuntimeError, match=words):
                rpc.rpc_sync(to, function, args, {name: number})
            with pytest.raises(RuntimeError, match=words):
                rpc.remote(to, function, args, {name: number}).to_here()
    assert rpc.rpc_sync("worker1", torch.ones, ([2],), {"dtype": torch.float16}).dtype == torch.float16


def test_the_error_of_an_operator_names_the_worker():
    with pytest.raises(RuntimeError, match=r"^On worker1: The size of tensor a \(2\) must match"):
        rpc.rpc_sync("worker1", torch.add, (torch.ones(2), torch.ones(3)))
