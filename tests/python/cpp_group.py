"""A Python worker in a group with a C++ worker: `python cpp_group.py CPP_WORKER` makes the checks of
test_mixed_groups.py. The C++ worker is rank 1 and called "cpp" (or, before the others in the alphabet, "a_cpp").
"""

import dataclasses
import subprocess
import sys
from pathlib import Path

import torch
from cpp_structs import Point, Shape, Unknown

import torchrpc
import torchrpc.autograd as dist_autograd
import torchrpc.rpc as rpc
from torchrpc import cpp_function
from torchrpc.optim import DistributedOptimizer

# --- functions that the C++ worker calls ---


def same(value):
    assert type(value) in (bool, int, float, complex, str, bytes, list, tuple, dict, type(None), *MORE), type(value)
    return value


MORE = [torch.Tensor, torch.device, torch.dtype, Point, Shape, Unknown]


def add(a, b):
    return a + b


def is_main(name):
    return name == rpc.get_worker_info().name


class Shapes:
    @staticmethod
    def square(x):
        return x * x


class Total:
    def __init__(self, start):
        self.value = start

    def add(self, n):
        self.value += n
        return self.value

    def total(self):
        return self.value


class Unsendable:
    pass


def give_unsendable():
    return Unsendable()


def fail():
    raise KeyError("not here")


def squared_error(parameter, x):
    return ((parameter.local_value() * x - 1) ** 2).sum()


def add_to_named(name, n):
    return torchrpc.lookup(name).rpc_sync().add(n)


def count_named(name, by):
    counter = torchrpc.lookup(name)
    return rpc.rpc_sync(counter.owner(), cpp_function("count"), args=(counter, by))


# --- the checks ---


def raises(text, action):
    try:
        action()
    except RuntimeError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no error with {text!r}")


def python_calls_cpp(cpp):
    x = torch.arange(3.0)
    assert torch.equal(rpc.rpc_sync(cpp, cpp_function("scale"), args=(x, 2)), 2 * x)
    assert torch.equal(rpc.rpc_async(cpp, cpp_function("scale"), args=(x, 0.5)).wait(), x / 2)
    assert torch.equal(rpc.remote(cpp, cpp_function("scale"), args=(x, 3.0)).to_here(), 3 * x)
    assert torch.equal(rpc.rpc_sync(cpp, torch.add, args=(x, x)), 2 * x)
    value = {"a": [1, 2.5, None, True, "text", (1, 2)], "b": {"c": [torch.ones(2)], "d": 1j}}
    echoed = rpc.rpc_sync(cpp, cpp_function("echo"), args=(value,))
    assert torch.equal(echoed["b"].pop("c")[0], value["b"].pop("c")[0])
    assert echoed == value


VALUES = {  # type in C++ -> values of it
    "bool": [True, False],
    "int8": [-128, 127],
    "char": [65],
    "int64": [-(2**63), 2**63 - 1, 0],
    "uint64": [0, 2**63 - 1, 2**63, 2**64 - 1],
    "float": [0.5, -1.25],
    "double": [0.1, 1e300, float("inf")],
    "complex": [1 - 2j],
    "string": ["", "text", "h\u00e9 \U0001f600\0"],
    "byte": [200],
    "bytes": [b"", b"\0\xff no UTF-8", bytes(range(256)) * 1000],
    "enum": [1],
    "duration": [1500],
    "device": [torch.device("cpu"), torch.device("cuda:1")],
    "optional": [None, 3],
    "ints": [[], [1, -2], list(range(1000))],
    "uint64s": [[2**64 - 1], [2**64 - 1 - i for i in range(300)]],
    "floats": [[0.5], [i / 4 for i in range(5000)]],
    "doubles": [[], [0.1, 2.0], [i / 3 for i in range(5000)]],
    "complexes": [[1j] * 300],
    "bools": [[True, False], [True] * 1000],
    "strings": [["a", ""], []],
    "matrix": [[[0.5] * 300, [], [1.0]]],
    "array": [[1, 2, 3]],
    "unordered_set": [[1]],
    "set": [["a", "b"]],
    "pair": [(1, "one")],
    "tuple": [(1, 0.5, True)],
    "map": [{"a": [1, 2], "b": list(range(300))}, {}],
    "uint64_map": [{1: 1, 2**64 - 1: 2}],
    "pair_map": [{(1, 2): 0.5, (3, 4): 1.5}],
    "unordered_map": [{1: "one"}],
    "variant": [None, 3, "text", [0.5, 1.5], [0.5] * 300],
    "point": [Point(1.0, 2.0)],
    "points": [[Point(float(i), 0.5) for i in range(100)]],
    "shape": [Shape("triangle", [Point(0.0, 0.0)], {"a": Point(1.0, 1.0)}, Point(2.0, 2.0), b"\xff" * 5000)],
}


def alike(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if dataclasses.is_dataclass(a):
        a, b = (type(a), vars(a)), (type(b), vars(b))
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


def values_of_each_type_cross(cpp):
    module = __name__ if __name__ != "__main__" else "cpp_group"
    shape = Shape("heavy", [], {}, weight=torch.arange(5000.0))
    values = VALUES | {"tensor": [torch.arange(5000)], "shape": [*VALUES["shape"], shape]}
    for kind, all_of_kind in values.items():
        for value in all_of_kind:
            sent = dataclasses.replace(value, weight=torch.ones(1)) if kind == "shape" and value is not shape else value
            for name, *more in ((f"same.{kind}",), (f"through.{kind}", f"{module}.same"), ("same.any",)):
                result = rpc.rpc_sync(cpp, cpp_function(name), args=(*more, sent))
                assert alike(sent, result), (name, sent, result)
            result = rpc.rpc_sync(cpp, cpp_function("through.any"), args=(f"{module}.same", sent))
            assert alike(sent, result), (kind, sent, result)
    remote = rpc.remote(cpp, cpp_function("same.point"), args=(Point(1.0, 2.0),))
    assert remote.to_here() == Point(1.0, 2.0)
    assert rpc.rpc_sync(cpp, cpp_function("same.any"), args=(Unknown(5),)) == Unknown(5)
    assert rpc.rpc_sync(cpp, cpp_function("same.dtype"), args=(torch.int32,)) == 3  # an int in C++
    raises(
        "expected a Point, but got a unknown", lambda: rpc.rpc_sync(cpp, cpp_function("same.point"), args=(Unknown(),))
    )
    raises("Point.x: expected a number", lambda: rpc.rpc_sync(cpp, cpp_function("same.point"), args=(Point("1", 2.0),)))
    raises(
        "argument 0 (std::vector<std::byte>): expected bytes",
        lambda: rpc.rpc_sync(cpp, cpp_function("same.bytes"), args=("text",)),
    )


def errors_name_what_is_wrong(cpp):
    call = lambda name, *args: rpc.rpc_sync(cpp, cpp_function(name), args=args)  # noqa: E731
    raises("it failed on purpose", lambda: call("failOnPurpose"))
    raises("takes 2 arguments, the call has 1", lambda: call("scale", torch.ones(1)))
    raises("argument 1 (double): expected a number, but got a string", lambda: call("scale", torch.ones(1), "two"))
    raises("no C++ function named nothing", lambda: call("nothing"))
    raises("argument 0 of the C++ function echo, a Unsendable, cannot be sent", lambda: call("echo", Unsendable()))
    raises(f"{cpp} is a C++ program without Python", lambda: rpc.rpc_sync(cpp, add, args=(1, 2)))
    raises("which stays where it is", lambda: rpc.remote(cpp, cpp_function("makeCounter")).to_here())
    try:
        rpc.rpc_sync(cpp, cpp_function("echo"), kwargs={"value": 1})
    except TypeError as error:
        assert "positional arguments only" in str(error)
    else:
        raise AssertionError("keyword arguments were taken")


def objects_stay_in_cpp(cpp):
    counter = rpc.remote(cpp, cpp_function("makeCounter"))
    assert rpc.rpc_sync(counter.owner(), cpp_function("count"), args=(counter, 2)) == 2
    assert rpc.rpc_sync(counter.owner(), cpp_function("count"), args=(counter, 3)) == 5


def cpp_calls_python(cpp):
    module = __name__ if __name__ != "__main__" else "cpp_group"
    call = lambda name, *args: rpc.rpc_sync(cpp, cpp_function("callPython"), args=(name, list(args)))  # noqa: E731
    assert call("math.sqrt", 9.0) == 3.0
    assert torch.equal(call(f"{module}.add", torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))
    assert call(f"{module}:Shapes.square", 7) == 49
    assert torch.equal(
        rpc.rpc_sync(cpp, cpp_function("remotePython"), args=("torch.neg", torch.ones(2))).to_here(), -torch.ones(2)
    )
    failing = lambda name: rpc.rpc_sync(cpp, cpp_function("callPythonAndFail"), args=(f"{module}.{name}",))  # noqa: E731
    text = failing("fail")
    assert text.startswith("user exception") and "KeyError" in text, text
    assert "only Python can read" in failing("give_unsendable")
    assert "nowhere" in failing("nowhere")


def cpp_calls_methods_of_python(cpp):
    module = __name__ if __name__ != "__main__" else "cpp_group"
    mine = rpc.RRef(Total(1))
    made, added, total, again = rpc.rpc_sync(cpp, cpp_function("callMethods"), args=(mine, f"{module}:Total"))
    assert made == 2 and mine.local_value().value == 2
    assert added == 15 and total in (10, 15) and again == 15
    failing = lambda name: rpc.rpc_sync(cpp, cpp_function("callMethodAndFail"), args=(mine, name))  # noqa: E731
    assert failing("nothing").startswith("function: ") and "has no attribute 'nothing'" in failing("nothing")
    assert "value is not a method" in failing("value")


def errors_have_codes_in_cpp(cpp):
    failing = lambda name: rpc.rpc_sync(cpp, cpp_function("callPythonAndFail"), args=(name,))  # noqa: E731
    for module, name in ((__name__, "lacking"), ("no_such_module", "f"), (f"{__name__}:Total", "lacking")):
        text = failing(f"{module}.{name}")
        assert text.startswith("no such function (request): ") and name in text, text
    assert failing(f"{__name__}.fail").startswith("user exception (function): ")


def errors_have_types(cpp):
    for args in ((), (torch.ones(1),), (torch.ones(1), "two")):
        try:
            rpc.rpc_sync(cpp, cpp_function("scale"), args=args)
        except rpc.ArgumentMismatchError as error:
            assert isinstance(error, TypeError) and error.worker == cpp
        else:
            raise AssertionError("the arguments were taken")


def rrefs_pass_both_ways(cpp):
    mine = rpc.RRef(torch.arange(4))
    assert torch.equal(rpc.rpc_sync(cpp, cpp_function("fetch"), args=(mine,)), torch.arange(4))
    assert rpc.rpc_sync(cpp, cpp_function("fetchText"), args=(rpc.RRef("text"),)) == "text"
    assert rpc.rpc_sync(cpp, cpp_function("fetchDict"), args=(rpc.RRef({"a": 1, "b": 0.5}),)) == {"a": 1, "b": 0.5}
    theirs = rpc.rpc_sync(cpp, cpp_function("keep"), args=(torch.ones(2),))
    assert theirs.owner_name() == cpp and torch.equal(theirs.to_here(), torch.ones(2))
    first, second = rpc.rpc_sync(cpp, cpp_function("both"), args=(mine, theirs))
    assert first.is_owner() and first.local_value() is mine.local_value()
    assert torch.equal(second.to_here(), torch.ones(2))
    raises("expected a tensor", lambda: rpc.rpc_sync(cpp, cpp_function("fetch"), args=(rpc.RRef("text"),)))


def named_objects_cross(cpp):
    call = lambda name, *args: rpc.rpc_sync(cpp, cpp_function(name), args=args)  # noqa: E731
    # An object of Python, which either language registers, looks up and removes.
    for registered_by_cpp in (False, True):
        total = rpc.RRef(Total(1))
        if registered_by_cpp:
            assert call("registerNamed", "total", total) == ""
        else:
            torchrpc.register("total", total)
        assert call("callNamed", "total", "add", 4) == 5
        assert rpc.rpc_sync("silent", add_to_named, args=("total", 1)) == 6
        assert total.local_value().value == 6
        assert "invalid argument: the name 'total' belongs to an object of main" in call(
            "registerNamed", "total", total
        )
        unregister = torchrpc.unregister if registered_by_cpp else lambda name: call("unregisterNamed", name)
        unregister("total")
        for find in (torchrpc.lookup, unregister, lambda name: call("callNamed", name, "add", 1)):
            try:
                find("total")
            except rpc.NameNotFoundError as error:
                assert "has an object named 'total'" in str(error)
            else:
                raise AssertionError("the name was found")
    # An object of C++.
    for registered_by_cpp in (False, True):
        if registered_by_cpp:
            call("registerCounter", "counter")
        else:
            torchrpc.register("counter", rpc.remote(cpp, cpp_function("makeCounter")))
        assert call("countNamed", "counter", 2) == 2
        found = torchrpc.lookup("counter")
        assert found.owner_name() == cpp
        assert rpc.rpc_sync(found.owner(), cpp_function("count"), args=(found, 3)) == 5
        assert rpc.rpc_sync("silent", count_named, args=("counter", 1)) == 6
        try:
            torchrpc.register("counter", rpc.RRef(1))
        except ValueError as error:
            assert f"the name 'counter' belongs to an object of {cpp}" in str(error)
        else:
            raise AssertionError("the name was taken twice")
        torchrpc.unregister("counter")
    call("registerCounter", "stays until the end")


def autograd_and_optimizer_cross(cpp):
    weight = rpc.remote(cpp, cpp_function("weight"))
    optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.5)
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context:
        loss = rpc.rpc_sync(cpp, cpp_function("timesWeight"), args=(weight, x))
        dist_autograd.backward(context, [loss])
        assert torch.equal(dist_autograd.get_gradients(context)[x], torch.full((2,), 10.0))
        optimizer.step(context)
    assert torch.equal(weight.to_here(), torch.full((2,), 9.5))


def cpp_trains_what_python_owns(cpp):
    module = __name__ if __name__ != "__main__" else "cpp_group"
    parameter = torch.zeros(2, requires_grad=True)
    losses = rpc.rpc_sync(cpp, cpp_function("trainThere"), args=(f"{module}.squared_error", rpc.RRef(parameter), 5))
    assert losses[0] == 2.0 and losses == sorted(losses, reverse=True) and losses[-1] < 0.5, losses
    assert (parameter > 0.5).all()


CHECKS = [
    python_calls_cpp,
    values_of_each_type_cross,
    errors_name_what_is_wrong,
    objects_stay_in_cpp,
    cpp_calls_python,
    cpp_calls_methods_of_python,
    errors_have_codes_in_cpp,
    errors_have_types,
    rrefs_pass_both_ways,
    named_objects_cross,
    autograd_and_optimizer_cross,
    cpp_trains_what_python_owns,
]


def run_python(name, rank, world_size, port, cpp, checks):
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    for check in checks:
        check(cpp)
        print(check.__name__, "holds")
    rpc.shutdown()


def main():
    """cpp_group.py WORKER PORT CPP_NAME CPP_RANK: this process, the C++ worker and an idle Python worker."""
    worker, port, cpp, cpp_rank = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    mine, silent = [rank for rank in range(3) if rank != cpp_rank]
    others = [
        subprocess.Popen([worker, cpp, str(cpp_rank), "3", port]),
        subprocess.Popen(
            [sys.executable, "-c", f"import cpp_group; cpp_group.run_python('silent', {silent}, 3, {port}, None, [])"],
            cwd=Path(__file__).parent,
        ),
    ]
    import cpp_group  # under its module name, so that its functions have the same names on all workers

    cpp_group.run_python("main", mine, 3, port, cpp, cpp_group.CHECKS)
    for other in others:
        assert other.wait(60) == 0


if __name__ == "__main__":
    main()
