"""Attacks on a worker with `allowed_functions`: values, assembled by hand, that try to call or change what is not
listed, or to take much memory or time.
"""

import contextlib
import dataclasses
import decimal
import enum
import fractions
import functools
import struct
import sys
import threading
import time
import traceback

import pytest
import torch

import torchrpc.rpc as rpc
from torchrpc import _C, profiler
from torchrpc.nn import remote_module
from torchrpc.optim import _parts
from torchrpc.rpc import internal
from torchrpc.rpc._security.allow_list import check_method, find_listed
from torchrpc.rpc._values import exceptions, standard_kinds
from torchrpc.testing import workers

HERE = __name__
ran = []  # what attacks have run
registry = {"key": "value"}


def echo(value):
    return value


def note(*args):
    """Listed, and leaves a trace. An attack succeeds if it runs elsewhere than as the function of a call."""
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


class Loader:
    def __setstate__(self, state):
        ran.append(state)


class Filled(list):
    def extend(self, items):
        ran.append(items)


class Size(enum.Enum):
    SMALL = "small"


Rights = enum.Flag("Rights", [f"RIGHT_{number}" for number in range(13)], module=__name__)
Access = enum.IntFlag("Access", ["READ", "WRITE", "RUN"], module=__name__)


class Guarded:
    def __init__(self):
        self.is_admin = False

    def is_allowed(self):
        return False

    verify = functools.partial(dict.get, {})
    kind = dict

    @functools.cached_property
    def checked(self):
        return False

    @property
    def token(self):
        return "secret"


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    first: object
    second: object


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


LISTED = [
    *(echo, note, make_closure, get_registry, give_object, fail, Counter, Singleton, Size, Meta, Slotted),
    *(Rights, Access, Guarded, Pair, Loader, Filled),
]


@pytest.fixture(scope="module")
def worker():
    with workers(1, allowed_functions=[*LISTED, give_sent, apply, make_unlisted, torch.nn.Identity, profiler.profile]):
        yield


@pytest.fixture(autouse=True)
def no_traces():
    ran.clear()
    registry.clear()
    registry["key"] = "value"
    yield


# --- An assembler of the bytes of values: PROTOCOL.md, "Values" ---

NONE, TRUE = b"\0", b"\2"


def text(value):
    return b"\6" + struct.pack("<Q", len(value.encode())) + value.encode()


def number(value):
    if -(2**63) <= value < 2**63:
        return b"\3" + struct.pack("<q", value)
    digits = hex(value).encode()
    return b"\x16" + struct.pack("<Q", len(digits)) + digits


def raw(data):
    return b"\7" + struct.pack("<Q", len(data)) + data


def tensor(index):
    return b"\x08" + struct.pack("<I", index)


def many(tag, parts):
    return bytes((tag,)) + struct.pack("<I", len(parts)) + b"".join(parts)


def list_of(*parts):
    return many(9, parts)


def tuple_of(*parts):
    return many(10, parts)


def dict_of(**parts):
    return pairs([(text(key), value) for key, value in parts.items()])


def pairs(items):
    return b"\x0b" + struct.pack("<I", len(items)) + b"".join(key + value for key, value in items)


def set_of(*parts):
    return many(23, parts)


def same(index):
    return b"\x15" + struct.pack("<I", index)


def made(kind, *parts):
    return b"\x14" + struct.pack("<H", len(kind)) + kind.encode() + struct.pack("<I", len(parts)) + b"".join(parts)


def name(module, qualified_name):
    return made("global", text(module), text(qualified_name))


def own(qualified_name):
    return name(HERE, qualified_name)


def new(kind, fields, *contents, module=HERE):
    return made("object", text(module), text(kind), fields, *contents)


class Allowed:
    """Stands for the list of a worker."""

    worker, callers, is_for_member = "worker0", "*", True
    names = frozenset(f"{HERE}.{each.__name__}" for each in [*LISTED, apply])

    def entry_for(self, name):
        return name if name in self.names or name == "torch.nn.modules.linear.Identity" else ""

    def record_run(self, name):
        assert self.entry_for(name)  # not what Python itself has


def read(code, tensors=(), allowed=Allowed()):  # noqa: B008  it has no state
    """Read the bytes as a worker with a list does."""
    return _C._decode_objects(code, allowed, list(tensors))


def syntax_error(**fields):
    return made("exception", text("builtins"), text("SyntaxError"), tuple_of(), dict_of(**fields), dict_of())


REFUSALS = (rpc.NotAllowedError, rpc.SerializationError, rpc.NameNotFoundError, rpc.RpcError)


def refused(act):
    """The text of the error with which the worker refuses."""
    with pytest.raises(REFUSALS) as raised:
        act()
    return str(raised.value).split("Traceback")[0]


# --- What is called ---


@pytest.mark.parametrize(
    "code",
    [
        made("call", own("note")),
        made("note", number(1)),
        made("bytearray", number(1 << 10)),
        made("Decimal", number(1)),
        made("range", text("a")),
        made("datetime", *[number(1)] * 7, new("Counter", dict_of())),
        made("defaultdict", own("note")),
        made("partial", own("note")),
        made("ScriptFunction", text("__torch__.nobody")),
        new("Meta", dict_of(__module__=text(HERE))),
        new("Tensor", dict_of(), module="torch"),
        new("Popen", dict_of(args=text("true")), module="subprocess"),
        new("note", dict_of()),
        new("Loader", dict_of(a=number(1))),
        new("Size", dict_of(value=number(1))),
        new("Unlisted", dict_of()),
        made("member", text(HERE), text("Size"), text("__class__")),
        made("member", text(HERE), text("Counter"), text("add")),
        made("flags", text(HERE), text("Size"), number(1)),
        made("flags", text(HERE), text("Rights"), number(1 << 60)),
        made("exception", text(HERE), text("Counter"), tuple_of(), dict_of(), dict_of()),
        made("exception", text("builtins"), text("SystemExit"), tuple_of(), dict_of(), dict_of()),
        syntax_error(text=number(1)),
        syntax_error(lineno=text("1")),
        syntax_error(end_lineno=number(1 << 70)),
        syntax_error(text=text("x"), lineno=number(1), offset=number(1), end_offset=number(1 << 30)),
    ],
)
def test_a_value_calls_and_makes_only_what_is_listed(code):
    refused(lambda: read(code))
    assert not ran


def test_an_object_of_a_listed_class_is_made_without_its_code():
    assert vars(read(new("Counter", dict_of(value=number(2))))) == {"value": 2}
    filled = read(new("Filled", dict_of(), list_of(number(1))))
    assert type(filled) is Filled and list(filled) == [1] and not ran


def test_a_refused_module_is_not_imported():
    for code in (name("this", "s"), new("this", dict_of(), module="this.this"), made("ScriptFunction", text("this.f"))):
        refused(lambda code=code: read(code))
    assert not internal.find_global.__globals__["sys"].modules.get("this")


# --- State ---


@pytest.mark.parametrize(
    "code",
    [
        new("Singleton", dict_of(rights=text("all"))),
        new("Slotted", dict_of(watched=number(1))),
        new("Slotted", dict_of(extra=number(1))),
        new("Slotted", dict_of(value=number(1), __class__=own("Counter"))),
        new("OrderedDict", dict_of(items=own("note")), pairs([]), module="collections"),
        new("Counter", list_of(number(1))),
        new("Counter", pairs([(number(1), number(1))])),
        new("Counter", dict_of(), number(1)),
        new("Filled", dict_of(), tuple_of(number(1))),
        new("Filled", dict_of()),
        new("Pair", dict_of(first=number(1))),
        new("Pair", dict_of(first=number(1), second=number(1), third=number(1))),
    ],
)
def test_a_value_has_only_the_fields_of_its_class(code):
    Singleton()
    with contextlib.suppress(*REFUSALS):
        assert read(code) is not Singleton()
    assert not ran and Singleton().rights == "few"
    if b"Singleton" not in code:
        refused(lambda: read(code))


@pytest.mark.parametrize(
    ("kind", "attribute"),
    [
        *((("Guarded", HERE), each) for each in ("is_allowed", "checked", "token", "__array_interface__", "__class__")),
        (("Guarded", HERE), "verify"),
        *((("Guarded", HERE), each) for each in ("__reduce_ex__", "__module__", "__getstate__", "__torch_function__")),
        *((("Identity", "torch.nn.modules.linear"), each) for each in ("forward", "__array_interface__", "state_dict")),
    ],
)
def test_a_state_sets_no_name_that_python_or_the_class_needs(kind, attribute):
    text_ = refused(lambda: read(new(kind[0], dict_of(**{attribute: TRUE}), module=kind[1])))
    assert f"does not let others set the attribute {attribute}" in text_


@pytest.mark.parametrize("attribute", ["__array_interface__", "with_traceback", "__class__"])
def test_an_exception_has_no_such_attribute_either(attribute):
    parts = text("torchrpc.rpc"), text("RpcError"), tuple_of(), dict_of(), dict_of(**{attribute: TRUE})
    refused(lambda: read(made("exception", *parts)))


def test_a_state_sets_the_attributes_of_an_instance():
    made = read(new("Guarded", dict_of(is_admin=TRUE, kind=name("builtins", "list"))))
    assert made.is_admin is True and made.kind is list


def flags(cls, bits):
    return made("flags", text(HERE), text(cls), number(bits))


def test_flags_that_one_caller_sends_do_not_keep_others_from_theirs():
    for bits in [*range(8, 6000), *range(-6000, -8)]:  # with bits that have no name
        with contextlib.suppress(*REFUSALS):
            read(flags("Access", bits))
    assert [read(flags("Access", bits)) for bits in range(8)] == [Access(bits) for bits in range(8)]
    with contextlib.suppress(*REFUSALS):
        read(list_of(*[flags("Rights", bits) for bits in range(6000)]))
    assert read(flags("Rights", 3)) is Rights(3)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="earlier tracebacks suggest no names of modules")
def test_the_traceback_of_a_received_import_error_imports_nothing():
    module = "this"  # prints when it is imported
    fields = dict_of(msg=text("text"), name=text(module), name_from=text("name"))
    exc = read(made("exception", text("builtins"), text("ImportError"), tuple_of(), fields, dict_of()))
    assert "text" in "".join(traceback.format_exception(exc))
    assert module not in sys.modules


# --- Functions of the package ---

OWN_FUNCTIONS = [
    ("torchrpc.rpc.rref_proxy", "_call_method"),
    ("torchrpc.rpc.api", "_gather_to_leader"),
    ("torchrpc.rpc._utils", "_update_group_membership"),
    ("torchrpc.optim._parts", "_step"),
    ("torchrpc.nn.remote_module", "_run_forward"),
    ("torchrpc.profiler", "_start"),
    ("torchrpc.rpc._values.pickler", "_rref"),
    ("torchrpc.rpc._values.quantized", "make_packed"),
    ("torchrpc.rpc.internal", "PythonUDF"),
    ("torch._utils", "_rebuild_parameter"),
]


@pytest.mark.parametrize(("module", "function"), OWN_FUNCTIONS)
def test_functions_of_the_package_are_no_values(module, function):
    text_ = refused(lambda: read(list_of(name(module, function))))
    assert "worker0 does not let others run or send" in text_ and "[..." not in text_


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
def test_a_class_that_may_be_a_value_is_not_the_function_of_a_call(worker, function, args):
    refused(lambda: rpc.rpc_sync("worker0", function, args=args))


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
    refused(lambda: read(own("watched.secret")))
    refused(lambda: rpc.rpc_sync("worker0", apply, args=(Unlisted,)))
    assert not ran


def test_a_prefix_reads_no_properties(worker):
    class Prefix:
        worker, callers, is_for_member = "worker0", "*", True

        def entry_for(self, name):
            return f"{HERE}.*" if name.startswith(f"{HERE}.") else ""

    for name_ in ("watched.secret", "Slotted.watched", "torch.save", "registry"):
        with pytest.raises(rpc.NotAllowedError):
            find_listed(HERE, name_, Prefix())
    with pytest.raises(rpc.NotAllowedError):
        find_listed(f"{HERE}.__main__", "main", Prefix())
    assert find_listed(HERE, "Counter.add", Prefix()) is Counter.add and not ran


def test_a_profile_takes_no_functions_from_others(worker):
    with pytest.raises(rpc.NotAllowedError, match=r"worker0 .* does not take on_trace_ready"):
        rpc.rpc_sync("worker0", profiler._start, args=({"on_trace_ready": note},))


# --- Arguments, results and exceptions ---


class Sent:
    """Is sent as these bytes."""

    def __init__(self, code):
        self.code = code


@pytest.fixture
def sends_any_bytes(monkeypatch):
    """This process sends a `Sent` as its bytes: `_lowers` gives it a form that the receiver refuses."""
    monkeypatch.setitem(standard_kinds.LOWERS, Sent, ("call", lambda value: (value.code,)))


def give_sent():
    return Sent("x")


def test_arguments_and_results_are_read_under_the_list(worker, sends_any_bytes):
    assert "unknown kind call" in refused(lambda: rpc.rpc_sync("worker0", echo, args=(Sent("x"),)))
    assert "unknown kind call" in refused(lambda: rpc.rpc_sync("worker0", give_sent))


EXCEPTION_DETAILS = [
    pytest.param([("builtins", "exec")], id="a function"),
    pytest.param([("posix", "system")], id="a function that is not listed"),
    pytest.param([(HERE, "Counter"), (HERE, "Singleton")], id="class of two"),
    pytest.param([(HERE, "Counter")], id="no exception"),
    pytest.param([], id="nothing"),
    pytest.param([(1, 2)], id="no names"),
]


@pytest.mark.parametrize("names", EXCEPTION_DETAILS)
def test_exceptions_are_read_under_the_list(worker, monkeypatch, names):
    detail = _C._encode_objects((names, b"", b"", b"cos\nsystem\n."), None)
    monkeypatch.setattr(exceptions, "_detail_of", lambda exc: detail)
    with pytest.raises(RuntimeError, match="Failed to create original exception type") as raised:
        rpc.rpc_sync("worker0", fail)
    assert type(raised.value) is rpc.RemoteException and not ran


# --- Effort ---


def colliding(count=3000):
    """Numbers with the same hash."""
    return [number(key * ((1 << 61) - 1)) for key in range(count)]


def bomb(levels, wrap=lambda inner: tuple_of(inner, inner)):
    """A list of a value and of one that has it twice, and so on: few bytes, and 2**levels parts to hash in the last."""
    code = [tuple_of(number(0))]
    code += [wrap(same(level)) for level in range(levels)]
    return code


def pair_bomb(levels):
    parts = [new("Pair", dict_of(first=number(0), second=number(0)))]  # numbers 0 (its fields) and 1
    parts += [new("Pair", dict_of(first=same(2 * at + 1), second=same(2 * at + 1))) for at in range(levels)]
    return parts


def fractions_of(count=10_000):
    """Fractions of large numbers, whose greatest common divisor takes time: each has its own bytes."""
    large = [number(int.from_bytes(bytes([end]) * 1000, "little")) for end in (3, 5)]
    return [made("Fraction", *large)] * count


def copies_of(container, make, count=100_000):
    return [container, *[make(same(0))] * count]


def compared_again(first, second, at, wrap=lambda table: table, count=5000):
    """A list of two values and of many dicts, in each of which Python compares them, because their hashes are equal.

    Args:
        at: the number of the second value; that of the first one is 0.
    """
    table = pairs([(same(0), NONE), (same(at), NONE)])
    return list_of(first, second, table, *[wrap(table)] * count)


MODULUS = sys.hash_info.modulus
DECIMAL = made("Decimal", text("1.5"))
# With the hash of that Decimal.
FRACTION = made("Fraction", number(hash(decimal.Decimal("1.5")) * ((1 << 8000) - 1) % MODULUS + (MODULUS << 8100)),
                number((1 << 8000) - 1))  # fmt: skip
LARGE_INT = number(hash(decimal.Decimal("1.5")) + (MODULUS << 130_000))
FRACTIONS = compared_again(FRACTION, DECIMAL, 1)
COPIES_OF_FRACTIONS = compared_again(
    FRACTION, DECIMAL, 1, lambda _: new("OrderedDict", dict_of(), same(2), module="collections")
)


def array_of(shape):
    return made("array", text("<f8"), shape, b"\1", raw(bytes(8)))


SHAPE = tuple_of(*[number(1 << 250_000)] * 40)
LARGE_DICT = pairs([(number(key), NONE) for key in range(1000)])


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(made("Fraction", text("1e999999")), id="Fraction"),
        pytest.param(made("Fraction", number(3**5200), number((1 << 8192) + 1)), id="Fraction of large ints"),
        pytest.param(made("Decimal", text("1e999999999")), id="Decimal"),
        pytest.param(made("Decimal", text("1e-999999999")), id="small Decimal"),
        pytest.param(made("bytearray", number(1 << 28)), id="bytearray"),
        pytest.param(made("range", number(0), number(1 << 1500), number(3)), id="large range"),
        pytest.param(number(1 << (1 << 20)), id="large int"),
        pytest.param(made("slice", made("slice", NONE, NONE, NONE), NONE, NONE), id="slice"),
        pytest.param(
            list_of(*copies_of(LARGE_DICT, lambda it: new("Counter", dict_of(), it, module="collections"))),
            id="copies of a dict",
        ),
        pytest.param(
            list_of(*copies_of(list_of(*[NONE] * 1000), lambda it: new("Filled", dict_of(), it))), id="copies of a list"
        ),
        pytest.param(
            list_of(*copies_of(dict_of(**{f"n{at}": NONE for at in range(1000)}), lambda it: new("Guarded", it))),
            id="copies of fields",
        ),
        pytest.param(pairs([(key, NONE) for key in colliding()]), id="colliding keys"),
        pytest.param(set_of(*colliding()), id="colliding elements"),
        pytest.param(many(24, colliding()), id="colliding elements of a frozenset"),
        pytest.param(
            list_of(*[made("flags", text(HERE), text("Rights"), number(bits)) for bits in range(6000)]), id="flags"
        ),
        pytest.param(list_of(*bomb(40), pairs([(same(40), NONE)])), id="key of a dict"),
        pytest.param(list_of(*bomb(40), set_of(same(40))), id="element of a set"),
        pytest.param(list_of(*bomb(40), many(24, [same(40)])), id="element of a frozenset"),
        pytest.param(list_of(*pair_bomb(40), set_of(same(81))), id="dataclass as key"),
        pytest.param(FRACTIONS, id="Fraction and Decimal as keys"),
        pytest.param(COPIES_OF_FRACTIONS, id="copies of such a dict"),
        pytest.param(compared_again(tuple_of(LARGE_INT), tuple_of(DECIMAL), 2), id="large int and Decimal in keys"),
        pytest.param(
            compared_again(*[tuple_of(text("a" * 1_000_000))] * 2, 1, count=20_000), id="equal long texts in keys"
        ),
        pytest.param(list_of(*bomb(5000, tuple_of)), id="references to references"),
        pytest.param(b"\x0a\1\0\0\0" * 5000 + NONE, id="tuples"),
        pytest.param(b"\x09\1\0\0\0" * 300_000 + NONE, id="lists"),
        pytest.param(set_of(b"\x0a\1\0\0\0" * 300 + NONE), id="deep key"),
        pytest.param(made("array", text("<f8"), tuple_of(number(1 << 40)), b"\1", raw(bytes(8))), id="array"),
        pytest.param(array_of(SHAPE), id="shape of large ints"),
        pytest.param(array_of(tuple_of(*[number(2)] * 1_000_000)), id="shape of many ints"),
        pytest.param(made("array", text("<U99999999"), tuple_of(number(0)), b"\1", raw(b"")) + b"\0", id="dtype"),
        pytest.param(made("array", text("|O"), tuple_of(number(1)), b"\1", raw(bytes(8))), id="array of objects"),
    ],
)
def test_few_bytes_take_little_time_and_memory(code):
    start = time.process_time()
    refused(lambda: read(code))
    assert time.process_time() - start < 1


def test_time_is_in_proportion_to_the_bytes():
    start = time.process_time()
    read(list_of(*fractions_of(20)))
    assert time.process_time() - start < 1


SCALES = (tensor(1), tensor(2), number(0))


def test_expanded_parts_of_quantized_tensors_are_not_copied():
    parts = [torch.zeros(0, dtype=torch.uint8), torch.ones(1).expand(1 << 27), torch.zeros(1).expand(1 << 27)]
    code = made("quantized_packed", tensor(0), number(4), tuple_of(number(1 << 27), number(0)), *SCALES)
    assert "memory of their own" in refused(lambda: read(code, parts))


def test_received_memory_is_copied_once_for_free():
    parts = [torch.zeros(1 << 20, dtype=torch.uint8), torch.ones(2), torch.zeros(2)]
    code = made("quantized_packed", tensor(0), number(4), tuple_of(number(2), number(1 << 20)), *SCALES)
    assert read(list_of(code), parts)[0].shape == (2, 1 << 20)
    assert "too much memory or time" in refused(lambda: read(list_of(*[code] * 100), parts))


@pytest.mark.parametrize(
    ("bits", "sizes", "parameters", "words"),
    [
        (4, (2, 5), SCALES, "must be made of bytes that fit its sizes"),
        (4, (1 << 40, 1 << 40), SCALES, "must be made of bytes that fit its sizes"),
        (8, (4,), SCALES, "must be made of its bytes"),
        (4, (2, -4), SCALES, "sizes that are numbers"),
        (4, (2, 1 << 64), SCALES, "sizes that are numbers"),
        (4, (2, 4), (number(3),), "must be made of its bytes"),
        (4, (2, 4), (*SCALES[:2], number(2)), "scales of its axis"),
        (4, (4, 2), SCALES, "scales of its axis"),
    ],
)
def test_packed_tensors_that_do_not_fit_their_bytes_are_refused(bits, sizes, parameters, words):
    code = made("quantized_packed", tensor(0), number(bits), tuple_of(*map(number, sizes)), *parameters)
    tensors = [torch.zeros(4, dtype=torch.uint8), torch.tensor([0.1, 0.2]), torch.tensor([0.5, 0.0])]
    assert words in refused(lambda: read(code, tensors))


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [
        ("<f4", (2,), bytes(4)),
        ("<f4", (-1,), bytes(4)),
        ("<f4", (2, 1 << 62), bytes(8)),
        ("|V4", (1,), bytes(4)),
        ("<f4,<f4", (1,), bytes(8)),
        ("|O8", (1,), bytes(8)),
        ("O", (1,), bytes(8)),
        ("<M8[3x]", (1,), bytes(8)),
        ("|S0", (1 << 60,), b""),
        ("f4", (1,), bytes(4)),
    ],
)
def test_an_array_has_a_dtype_of_the_table_and_bytes_that_fit(dtype, shape, data):
    code = made("array", text(dtype), tuple_of(*map(number, shape)), b"\1", raw(data))
    refused(lambda: read(code))
    assert read(made("array", text("<i4"), tuple_of(number(2)), b"\1", raw(bytes(8)))).tolist() == [0, 0]


def test_the_bytes_of_an_array_lie_side_by_side():
    for data in (torch.zeros(4, dtype=torch.uint8).expand(4, 4)[:, 0], torch.zeros(4), torch.eye(2).to_sparse()):
        code = made("array", text("<i4"), tuple_of(number(1)), b"\1", tensor(0))
        refused(lambda code=code, data=data: read(code, [data]))


def test_many_keys_that_do_not_collide_are_taken(worker):
    for keys in ([*range(100_000)], [key << 40 for key in range(5000)], [key / 7 for key in range(5000)]):
        for value in (dict.fromkeys(keys, Size.SMALL), {Size.SMALL, *keys}):
            assert rpc.rpc_sync("worker0", echo, args=(value,)) == value
        assert rpc.rpc_sync("worker0", echo, args=(dict.fromkeys(keys),)) == dict.fromkeys(keys)


def test_a_key_that_hashes_much_is_taken_if_its_bytes_are_many(worker):
    value = [{tuple(range(50_000)), 1}]
    assert rpc.rpc_sync("worker0", echo, args=(value,)) == value


@pytest.mark.parametrize("tag", [b"\x11", b"\x12"], ids=["list", "bytes"])
@pytest.mark.parametrize("allowed", [Allowed(), None])
def test_the_numbers_of_a_tensor_are_not_copied_for_each_reference(tag, allowed):
    numbers = torch.zeros(1 << 20, dtype=torch.uint8)
    code = [tag + struct.pack("<I", index) for index in range(20)]
    views = [numbers[index:] for index in range(20)]
    assert len(read(code[0], views, allowed)) == len(numbers)
    assert "the same numbers too often" in refused(lambda: read(list_of(*code[:1] * 20), views, allowed))
    assert "the same numbers too often" in refused(lambda: read(list_of(*code), views, allowed))


def test_a_worker_that_reads_a_large_value_lets_other_threads_run():
    begun, ended, turns = threading.Event(), threading.Event(), 0

    class Reports(Allowed):
        def record_run(self, name):
            (ended if begun.is_set() else begun).set()

    parts = [new("Guarded", dict_of()), *[NONE] * 10_000_000, new("Guarded", dict_of())]
    reader = threading.Thread(target=read, args=(list_of(*parts),), kwargs={"allowed": Reports()})
    reader.start()
    begun.wait()
    while not ended.is_set():
        turns += 1
        time.sleep(0)  # gives the GIL away
    reader.join()
    assert turns > 3


# --- Malformed values ---


@pytest.mark.parametrize(
    "code",
    [
        b"",
        b"\xff",
        b"\x14",
        b"\x15\0\0\0\0",
        list_of(same(0)),
        b"\x14\xff\xff",
        made("", NONE),
        made("object"),
        made("object", text("a")),
        made("object", number(1), number(1), number(1)),
        made("global", text("os")),
        made("member", text(HERE), text("Size"), number(1)),
        made("constant", text("nothing")),
        b"\x14\1\0a\xff\xff\xff\xff",
        set_of(list_of()),
        pairs([(list_of(), NONE)]),
        b"\x16\1\0\0\0\0\0\0\0z",
        b"\x14\1\0\xff\0\0\0\0",
    ],
)
@pytest.mark.parametrize("allowed", [Allowed(), None])
def test_malformed_values_are_refused(code, allowed):
    assert refused(lambda: read(code, allowed=allowed))
