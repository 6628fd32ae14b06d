"""Attacks on a worker with `allowed_functions`: pickles, assembled by hand, that try to call or change what is not
listed.
"""

import decimal
import enum
import fractions
import os
import pickle
import time

import pytest
import torch

import torchrpc.rpc as rpc
from torchrpc import profiler
from torchrpc.nn import remote_module
from torchrpc.optim import _parts
from torchrpc.rpc import _exceptions as exceptions
from torchrpc.rpc import api, internal
from torchrpc.rpc._allow_list import check_method, find_listed
from torchrpc.testing import workers

HERE = __name__
ran = []  # what attacks have run
registry = {"key": "value"}


def echo(value):
    return value


def note(*args):
    """Listed, and leaves a trace. An attack succeeds if it runs elsewhere than as the function of a call or REDUCE."""
    ran.append(args)
    return args


def make_closure():
    def closure(*args):
        ran.append(args)

    return closure


def get_registry():
    return registry


def give_object():
    return object()


def fail():
    raise ValueError("text")


def apply(function, *args):
    return function(*args)


class Counter:
    def __init__(self, value=0):
        self.value = value

    def add(self, number):
        return self.value + number

    def __call__(self, *args):
        ran.append(args)
        return torch.nn.Identity()


class Unlisted:
    """Has the methods that the functions of the package call."""

    training = True

    def add(self, number):
        ran.append(("add", number))

    def forward(self, *args):
        ran.append(("forward", *args))

    def parameters(self, recurse):
        ran.append(("parameters", recurse))
        return []

    def train(self, mode):
        ran.append(("train", mode))

    def step(self, *args):
        ran.append(("step", *args))

    def state(self):
        ran.append(("state",))

    def load(self, *args):
        ran.append(("load", *args))


class Singleton:
    instance = None

    def __new__(cls):
        if cls.instance is None:
            cls.instance = super().__new__(cls)
            cls.instance.rights = "few"
        return cls.instance


class Size(enum.Enum):
    SMALL = "small"


class Meta(type):
    pass


class Slotted:
    __slots__ = ("value",)

    @property
    def watched(self):
        return None

    @watched.setter
    def watched(self, value):
        ran.append(value)


class UnlistedOptimizer(torch.optim.SGD):
    def step(self, closure=None):
        ran.append("step")

    def state_dict(self):
        ran.append("state_dict")
        return super().state_dict()

    def load_state_dict(self, state):
        ran.append("load_state_dict")


class Watched:
    @property
    def secret(self):
        ran.append("secret")


watched = Watched()


def make_unlisted():
    return Unlisted()


LISTED = [echo, note, make_closure, get_registry, give_object, fail, Counter, Singleton, Size, Meta, Slotted]


@pytest.fixture(scope="module")
def worker():
    with workers(1, allowed_functions=[*LISTED, apply, make_unlisted, torch.nn.Identity, profiler.profile]):
        yield


@pytest.fixture(autouse=True)
def no_traces():
    ran.clear()
    registry.clear()
    registry["key"] = "value"
    yield


# --- An assembler ---

N, T, MARK, EMPTY = b"N", b"\x88", b"(", b")"
REDUCE, BUILD, NEWOBJ, SETITEMS, APPENDS, ADDITEMS, POP = b"R", b"b", b"\x81", b"u", b"e", b"\x90", b"0"


def text(value):
    data = value.encode()
    return b"\x8c" + bytes([len(data)]) + data if len(data) < 256 else b"X" + len(data).to_bytes(4, "little") + data


def number(value):
    data = pickle.encode_long(value)
    return b"\x8a" + bytes([len(data)]) + data


def name(module, qualified_name):
    return text(module) + text(qualified_name) + b"\x93"


def own(qualified_name):
    return name(HERE, qualified_name)


def tuple_of(*parts):
    return MARK + b"".join(parts) + b"t"


def dict_of(**parts):
    return b"}" + MARK + b"".join(text(key) + value for key, value in parts.items()) + SETITEMS


def reduce(function, *args):
    return function + tuple_of(*args) + REDUCE


def new(kind, *args):
    return kind + tuple_of(*args) + NEWOBJ


def build(value, state):
    return value + state + BUILD


def slots(**parts):
    """A state that Python's unpickler sets by setattr."""
    return tuple_of(N, dict_of(**parts))


def call(function, *args):
    return new(name("torchrpc.rpc.internal", "PythonUDF"), function, tuple_of(*args), b"}")


def whole(code):
    return b"\x80\x05" + code + b"."


class Raw(internal._InternalRPCPickler):
    """Sends these bytes instead of a call."""

    def __init__(self, data, tensors=()):
        super().__init__()
        self.data, self.tensors = data, list(tensors)

    def serialize(self, obj):
        return self.data + bytes(4), self.tensors


def send(code, tensors=()):
    """Send the code as the bytes of a call to this worker, which has a list; return the result."""
    with api._use_rpc_pickler(Raw(whole(code), tensors)):
        return rpc.rpc_sync("worker0", echo, args=(object(),))


def as_argument(code, tensors=()):
    return send(call(own("echo"), code), tensors)


REFUSALS = (rpc.NotAllowedError, rpc.SerializationError)


def refused(act):
    """The error with which the worker refuses; it names the worker."""
    with pytest.raises(REFUSALS) as raised:
        act()
    assert "worker0" in str(raised.value)
    return str(raised.value).split("Traceback")[0]


# --- REDUCE, NEWOBJ ---


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(reduce(reduce(own("make_closure")), number(1)), id="result of a function"),
        pytest.param(reduce(reduce(own("Counter")), number(1)), id="instance"),
        pytest.param(reduce(build(new(own("Counter")), dict_of(value=own("note"))), number(1)), id="built instance"),
        pytest.param(reduce(name("torch", "Tensor"), number(3)), id="torch.Tensor"),
        pytest.param(reduce(name("builtins", "bytearray"), number(1 << 10)), id="bytearray of a size"),
        pytest.param(reduce(name("builtins", "int"), text("7")), id="int of a text"),
        pytest.param(reduce(name("builtins", "list"), text("ab")), id="list"),
        pytest.param(reduce(name("torchrpc.rpc.internal", "PythonUDF"), N, N, N), id="PythonUDF"),
        pytest.param(new(own("Meta"), text("Counter"), EMPTY, dict_of(__module__=text(HERE))), id="metaclass"),
        pytest.param(
            reduce(own("Meta"), text("Counter"), EMPTY, dict_of(__module__=text(HERE))), id="metaclass called"
        ),
        pytest.param(reduce(name("torchrpc.nn.remote_module", "_run_forward"), N, N, N, N, N), id="own function"),
        pytest.param(new(name("builtins", "bytearray"), number(1 << 10)), id="NEWOBJ of bytearray"),
        pytest.param(new(name("torch", "Tensor"), number(3)), id="NEWOBJ of torch.Tensor"),
    ],
)
def test_a_pickle_calls_only_what_is_listed(worker, code):
    refused(lambda: as_argument(code))
    assert not ran


def test_a_pickle_calls_listed_functions_and_classes_as_a_caller_may(worker):
    assert as_argument(reduce(own("note"), number(1))) == (1,)
    assert as_argument(reduce(own("Counter"), number(1))).value == 1
    assert as_argument(build(new(own("Counter")), dict_of(value=number(2)))).value == 2


# --- BUILD ---


@pytest.mark.parametrize(
    ("code", "is_unchanged"),
    [
        pytest.param(
            build(name("torch.serialization", "_get_layout"), slots(cache=N)),
            lambda: torch.serialization._get_layout.cache is not None,
            id="function of torch",
        ),
        pytest.param(
            build(name("torchrpc.rpc.internal", "PythonUDF"), slots(local_value=own("note"))),
            lambda: not hasattr(internal.PythonUDF, "local_value"),
            id="class of the package",
        ),
        pytest.param(
            build(own("Counter"), slots(extra=own("note"))), lambda: not hasattr(Counter, "extra"), id="listed class"
        ),
        pytest.param(build(own("echo"), slots(extra=N)), lambda: not hasattr(echo, "extra"), id="listed function"),
        pytest.param(build(own("echo"), dict_of(extra=N)), lambda: not hasattr(echo, "extra"), id="dict of a function"),
        pytest.param(
            build(name("torchrpc.rpc", "RpcError"), slots(extra=N)),
            lambda: not hasattr(rpc.RpcError, "extra"),
            id="class of an error",
        ),
        pytest.param(
            build(reduce(own("Size"), text("small")), dict_of(extra=N)),
            lambda: not hasattr(Size.SMALL, "extra"),
            id="member of an enum",
        ),
        pytest.param(
            build(new(own("Singleton")), dict_of(rights=text("all"))),
            lambda: Singleton().rights == "few",
            id="singleton",
        ),
        pytest.param(
            build(reduce(own("get_registry")), N), lambda: registry == {"key": "value"}, id="result of a function"
        ),
        pytest.param(build(new(own("Slotted")), slots(watched=number(1))), lambda: not ran, id="property"),
        pytest.param(
            build(build(new(own("Counter")), dict_of(__setstate__=own("note"))), number(1)),
            lambda: not ran,
            id="__setstate__ of the instance",
        ),
        pytest.param(
            build(reduce(name("collections", "OrderedDict")), dict_of(items=own("note"))),
            lambda: not ran,
            id="method of an OrderedDict",
        ),
    ],
)
def test_a_pickle_sets_no_attributes_but_those_of_its_own_instances(worker, code, is_unchanged):
    Singleton()
    try:
        refused(lambda: as_argument(code))
        assert is_unchanged()
    finally:
        undo_changes()


def undo_changes():
    """So that an attack that succeeds fails one test only."""
    torch.serialization._get_layout.cache = {}
    for holder, attribute in ((internal.PythonUDF, "local_value"), (Counter, "extra"), (rpc.RpcError, "extra")):
        if attribute in vars(holder):
            delattr(holder, attribute)
    for holder in (echo, Size.SMALL):
        vars(holder).pop("extra", None)
    Singleton().rights = "few"


# --- Items ---


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(reduce(own("get_registry")) + MARK + text("key") + N + SETITEMS, id="dict of the worker"),
        pytest.param(
            build(new(own("Counter")), dict_of(extend=own("note"))) + MARK + N + APPENDS, id="extend of the instance"
        ),
        pytest.param(
            build(new(own("Counter")), dict_of(add=own("note"))) + MARK + N + ADDITEMS, id="add of the instance"
        ),
    ],
)
def test_a_pickle_fills_no_containers_but_its_own(worker, code):
    with pytest.raises(Exception, match=r"."):
        as_argument(code)
    assert not ran and registry == {"key": "value"}


def test_a_tensor_of_the_message_is_not_written_to(worker):
    tensor = torch.zeros(2)
    code = reduce(name("torchrpc.rpc._pickler", "_tensor"), number(0)) + MARK + number(0) + number(5) + SETITEMS
    refused(lambda: as_argument(code, [tensor]))


# --- Functions of the package ---

OWN_FUNCTIONS = [
    ("torchrpc.rpc.rref_proxy", "_call_method"),
    ("torchrpc.rpc.api", "_gather_to_leader"),
    ("torchrpc.rpc._utils", "_update_group_membership"),
    ("torchrpc.optim._parts", "_step"),
    ("torchrpc.nn.remote_module", "_run_forward"),
    ("torchrpc.profiler", "_start"),
    ("torchrpc.rpc._pickler", "_rref"),
    ("torchrpc.rpc._pickler", "_tensor"),
    ("torchrpc.rpc._pickler", "_untyped_storage"),
    ("torchrpc.rpc._pickler", "_per_channel"),
    ("torchrpc.rpc.internal", "PythonUDF"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch.serialization", "_get_layout"),
]


@pytest.mark.parametrize(("module", "function"), OWN_FUNCTIONS)
@pytest.mark.parametrize("wrap", [lambda code: code, lambda code: b"]" + code + b"a", lambda code: dict_of(x=code)])
def test_functions_of_the_package_are_no_values(worker, module, function, wrap):
    assert "belongs to torchrpc" in refused(lambda: as_argument(wrap(name(module, function))))


def test_a_function_of_the_package_is_no_value_beside_the_call_of_it(worker):
    function = name("torchrpc.rpc.api", "_rref_typeof_on_owner") + b"\x94"  # MEMOIZE, as number 0
    refused(lambda: send(new(name("torchrpc.rpc.internal", "PythonUDF"), function, tuple_of(b"h\x00"), b"}")))


def test_a_call_is_no_value(worker):
    refused(lambda: as_argument(call(own("note"))))
    # The list of the arguments would contain the call.
    code = name("torchrpc.rpc.internal", "PythonUDF") + own("echo") + b"]\x94" + b"\x85" + b"}" + b"\x87\x81\x94"
    refused(lambda: send(code + b"h\x00" + b"h\x01" + b"a0"))


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (bytearray, (1 << 10,)),
        (torch.Tensor, (3,)),
        (decimal.Decimal, ("1",)),
        (fractions.Fraction, ("1",)),
        (dict, ()),
        (internal.PythonUDF, (1, 2, 3)),
        (torch._utils._rebuild_parameter, (torch.ones(1), True, {})),
        (rpc.RpcError, ("text",)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_only_pickles_need_is_not_the_function_of_a_call(worker, function, args):
    refused(lambda: rpc.rpc_sync("worker0", function, args=args))


@pytest.mark.parametrize("function", [name("builtins", "bytearray"), name("torchrpc.rpc._pickler", "_rref"), N])
def test_the_function_of_a_pickled_call_is_a_listed_one(worker, function):
    refused(lambda: send(call(function, number(1 << 10))))


def test_a_call_is_made_by_a_pickle_of_a_call_only(worker):
    state = dict_of(func=own("note"), args=tuple_of(number(1)), kwargs=b"}")
    refused(lambda: send(build(new(own("Counter")), state)))
    assert not ran


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (remote_module._run_forward, ("cpu", False, (1,), {})),
        (remote_module._parameter_rrefs, (True,)),
        (remote_module._set_training, (False,)),
        (_parts._step, (0, None)),
        (_parts._state, ()),
        (_parts._load, ([], [])),
    ],
)
def test_the_package_runs_no_methods_of_unlisted_classes(worker, function, args):
    rref = rpc.remote("worker0", make_unlisted)
    with pytest.raises((rpc.NotAllowedError, TypeError), match=r"Unlisted"):
        rpc.rpc_sync("worker0", function, args=(rref, *args))
    assert not ran


@pytest.mark.parametrize("function", [_parts._step, _parts._state, _parts._load])
def test_an_optimizer_of_an_unlisted_class_does_not_step(worker, function):
    parameter = rpc.RRef(torch.nn.Parameter(torch.ones(1)))
    local = _parts._LocalOptimizer(UnlistedOptimizer, [{"params": [parameter]}], (), {"lr": 0.1}, False)
    args = {_parts._step: (0, None), _parts._state: (), _parts._load: ([{}], [{}])}[function]
    with pytest.raises(rpc.NotAllowedError, match=r"UnlistedOptimizer\."):
        rpc.rpc_sync("worker0", function, args=(rpc.RRef(local), *args))
    assert not ran


@pytest.mark.parametrize(
    "function", [remote_module._run_forward, remote_module._set_training, remote_module._parameter_rrefs]
)
def test_an_object_cannot_pass_for_an_rref(worker, function):
    fake = Counter()
    fake.local_value = make_unlisted
    args = {remote_module._run_forward: ("cpu", False, (), {})}.get(function, (True,))
    with pytest.raises(rpc.NotAllowedError, match=r"in the place of an RRef"):
        rpc.rpc_sync("worker0", function, args=(fake, *args))
    assert not ran


def test_a_module_is_not_made_by_an_instance_of_a_listed_class(worker):
    with pytest.raises(rpc.NotAllowedError, match=r"Counter\.__call__"):
        rpc.rpc_sync("worker0", remote_module._create_module, args=(Counter(), (), {}, "cpu", None))
    assert not ran


def test_a_remote_module_of_a_listed_class_works(worker):
    module = remote_module.RemoteModule("worker0", torch.nn.Identity)
    assert module(torch.ones(1)).item() == 1 and module.train(False) is module and not module.remote_parameters()


# --- Names that objects claim ---


def test_a_class_cannot_pass_for_a_listed_one_by_its_name(worker):
    impostor = type("Counter", (), {"__module__": HERE, "add": lambda self, number: ran.append(number)})
    assert impostor.__qualname__ == Counter.__qualname__
    with pytest.raises(rpc.NotAllowedError, match=r"Counter\.add"):
        rpc.RRef(impostor()).rpc_sync().add(1)
    assert not ran


def test_a_metaclass_cannot_lend_its_classes_a_listed_name(worker):
    lender = type("Lender", (type,), {"__module__": property(lambda cls: HERE), "__qualname__": "Counter"})
    borrower = lender("Borrower", (), {"add": lambda self, number: None})
    for value in (borrower(), borrower):
        with pytest.raises(rpc.NotAllowedError):
            check_method(value, "add")


def test_an_attribute_of_an_object_is_no_method_of_its_class(worker):
    counter = Counter()
    counter.extra = note
    rref = rpc.remote("worker0", echo, args=(counter,))
    with pytest.raises(rpc.NotAllowedError, match=r"Counter\.extra"):
        rref.rpc_sync().extra(1)
    assert not ran


def test_a_refused_name_reads_no_properties(worker):
    refused(lambda: as_argument(own("watched.secret")))
    refused(lambda: rpc.rpc_sync("worker0", apply, args=(Unlisted,)))
    assert not ran


def test_a_prefix_reads_no_properties(worker):
    class Allowed:
        worker, callers, is_for_member = "worker0", "*", True

        def entry_for(self, name):
            return f"{HERE}.*" if name.startswith(f"{HERE}.") else ""

    for name_ in ("watched.secret", "Slotted.watched", "torch.save", "registry"):
        with pytest.raises(rpc.NotAllowedError):
            find_listed(HERE, name_, Allowed())
    with pytest.raises(rpc.NotAllowedError):
        find_listed(f"{HERE}.__main__", "main", Allowed())
    assert find_listed(HERE, "Counter.add", Allowed()) is Counter.add and not ran


def test_a_profile_takes_no_functions_from_others(worker):
    with pytest.raises(rpc.NotAllowedError, match=r"worker0 .* does not take on_trace_ready"):
        rpc.rpc_sync("worker0", profiler._start, args=({"on_trace_ready": note},))


# --- Results and exceptions ---


def test_results_are_read_under_the_list(worker, monkeypatch):
    code = build(own("Counter"), slots(extra=own("note")))
    monkeypatch.setattr(internal._internal_rpc_pickler, "serialize", lambda obj: (whole(code) + bytes(4), []))
    refused(lambda: rpc.rpc_sync("worker0", give_object))
    assert "extra" not in vars(Counter)


def test_a_call_is_no_result(worker, monkeypatch):
    code = call(own("note"))
    monkeypatch.setattr(internal._internal_rpc_pickler, "serialize", lambda obj: (whole(code) + bytes(4), []))
    refused(lambda: rpc.rpc_sync("worker0", give_object))


EXCEPTION_DETAILS = [
    pytest.param(tuple_of(build(own("Counter"), slots(extra=N)), b"}"), id="BUILD of a class"),
    pytest.param(tuple_of(name("builtins", "ValueError"), dict_of(a=reduce(reduce(own("make_closure"))))), id="REDUCE"),
    pytest.param(tuple_of(tuple_of(own("Counter"), own("Singleton")), b"}"), id="class of two"),
]


@pytest.mark.parametrize("code", EXCEPTION_DETAILS)
def test_exceptions_are_read_under_the_list(worker, monkeypatch, code):
    monkeypatch.setattr(exceptions, "_type_and_attributes", lambda exc: whole(code))
    with pytest.raises(RuntimeError, match="Failed to create original exception type") as raised:
        rpc.rpc_sync("worker0", fail)
    assert type(raised.value) is RuntimeError and not ran
    found = vars(Counter).get("extra", 0)
    if "extra" in vars(Counter):
        del Counter.extra
    assert found == 0


# --- Effort ---


def int_tuple_bomb(levels):
    """A tuple of two that are the same tuple of two …: few bytes, and 2**levels elements to hash."""
    return number(0) + b"".join(b"q" + bytes([level]) + b"h" + bytes([level]) + b"\x86" for level in range(levels))


def copies_of(kind, value, count=100_000):
    """A list of results of `kind(value)`, each with a few bytes of the pickle: the value is in the memo."""
    code = kind + b"q\x01" + value + b"q\x02" + b"00" + b"]" + MARK
    return code + b"h\x01h\x02\x85R" * count + b"e"


def fractions_of(count=10_000):
    """The same for fractions of large numbers, whose greatest common divisor takes time."""
    large = [b"\x8b" + (8000).to_bytes(4, "little") + bytes([end]) * 7999 + b"\x3f" for end in (3, 5)]
    code = name("fractions", "Fraction") + b"q\x01" + large[0] + b"q\x02" + large[1] + b"q\x03" + b"000]" + MARK
    return code + b"h\x01h\x02h\x03\x86R" * count + b"e"


LARGE_DICT = b"".join(number(key) + N for key in range(1000))


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(reduce(name("fractions", "Fraction"), text("1e999999")), id="Fraction"),
        pytest.param(reduce(name("fractions", "Fraction"), text("1"), text("1e999999")), id="Fraction of texts"),
        pytest.param(reduce(name("decimal", "Decimal"), text("1e999999999")), id="Decimal"),
        pytest.param(reduce(name("decimal", "Decimal"), text("1e-999999999")), id="small Decimal"),
        pytest.param(copies_of(name("builtins", "bytearray"), b"C\xff" + bytes(255)), id="copies of bytes"),
        pytest.param(copies_of(name("collections", "deque"), MARK + N * 1000 + b"t"), id="copies of a tuple"),
        pytest.param(copies_of(name("builtins", "set"), b"]" + MARK + N * 1000 + b"e"), id="copies of a list"),
        pytest.param(copies_of(name("collections", "Counter"), b"}" + MARK + LARGE_DICT + b"u"), id="copies of a dict"),
        pytest.param(fractions_of(), id="Fractions"),
        pytest.param(reduce(name("builtins", "bytearray"), number(1 << 28)), id="bytearray"),
        pytest.param(reduce(name("builtins", "bytes"), number(1 << 28)), id="bytes"),
        pytest.param(reduce(name("torch", "Tensor"), number(1 << 28)), id="Tensor"),
        pytest.param(
            reduce(name("builtins", "list"), reduce(name("builtins", "range"), *map(number, (0, 1 << 22, 1)))),
            id="list of a range",
        ),
        pytest.param(b"}" + int_tuple_bomb(22) + N + b"s", id="key of a dict"),
        pytest.param(b"\x8f" + MARK + int_tuple_bomb(22) + ADDITEMS, id="element of a set"),
        pytest.param(MARK + int_tuple_bomb(22) + b"\x91", id="element of a frozenset"),
    ],
)
def test_a_small_pickle_takes_little_time_and_memory(worker, code):
    start = time.process_time()
    refused(lambda: as_argument(code))
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    "code",
    [N + b"\x85" * 300_000, b"]" * 300_000 + b"a" * 299_999, MARK * 300_000 + b"t" * 300_000],
    ids=["tuples", "lists", "marks"],
)
def test_a_pickle_is_not_nested_without_end(worker, code):
    refused(lambda: as_argument(code))


def test_a_deep_key_does_not_end_the_process(run_python, tmp_path):
    """A hash of tuples in tuples recurses in C."""
    script = tmp_path / "deep_key.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "import test_limited_pickles as t\n"
        "with t.workers(1, allowed_functions=[t.echo]):\n"
        "    t.refused(lambda: t.as_argument(b'}' + t.N + b'\\x85' * 1_000_000 + t.N + b's'))\n"
    )
    run_python(script)


# --- Malformed pickles ---


@pytest.mark.parametrize(
    "code",
    [
        b"",
        b"R",
        b"b",
        b"h\x05",
        b"u",
        b"a",
        b"\x87",
        b"(",
        N + N,
        b"\xff",
        b"\x97",
        b"\x98",
        b"P1\n",
        b"Q",
        b"\x82\x01",
        b"I1\n",
        b"cos\nsystem\n",
        b"(ios\nsystem\n",
        b"(o",
        b"2",
        b"\x8c\xff",
        b"\x8d" + b"\xff" * 8,
        b"\x8b\xff\xff\xff\xff",
        b"\x95" + b"\xff" * 7,
        b"\x80\x09",
        b"\x80\x00",
        text("os") + N + b"\x93",
        b"}" + b"]" + N + b"s",
    ],
)
def test_malformed_pickles_are_refused_with_the_name_of_the_worker(worker, code):
    refused(lambda: send(code))
