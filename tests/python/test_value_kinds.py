"""The kinds of value that workers with `allowed_functions` send to each other, and those that they refuse."""

import collections
import dataclasses
import datetime
import decimal
import enum
import errno
import fractions
import functools
import math
import pathlib
import threading
import types
import uuid
import warnings
from typing import NamedTuple

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import torchrpc.rpc as rpc
from torchrpc import _C
from torchrpc.testing import free_port, run_ranks, workers

UTC = datetime.timezone.utc


class Color(enum.Enum):
    RED = 1
    CRIMSON = 1
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


class Text(str, enum.Enum):
    A = "a"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Pair(NamedTuple):
    first: object
    second: object = None


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Record:
    first: object
    second: object = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: object
    size: int = dataclasses.field(init=False, default=7)


@dataclasses.dataclass(slots=True)
class SlottedRecord:
    value: object


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    value: object


@dataclasses.dataclass(kw_only=True)
class KeywordRecord:
    value: object = None


@dataclasses.dataclass
class DerivedRecord(Record):
    third: object = None


class Plain:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Slots:
    __slots__ = ("__private", "left", "right")

    def __init__(self, left, right):
        self.left, self.right, self.__private = left, right, "own"


class SlotsAndDict(Slots):
    pass


class EmptySlot:
    __slots__ = ("left", "right")

    def __init__(self):
        self.left = 1


class OwnInt(int):
    pass


class OwnFloat(float):
    pass


class OwnStr(str):
    pass


class OwnBytes(bytes):
    pass


class OwnTuple(tuple):
    __slots__ = ()


class OwnList(list):
    pass


class OwnDict(dict):
    pass


class OwnSet(set):
    pass


class OwnFrozenSet(frozenset):
    pass


class OwnOrderedDict(collections.OrderedDict):
    pass


class OwnDeque(collections.deque):
    pass


class OwnCounter(collections.Counter):
    pass


class OwnDefaultDict(collections.defaultdict):
    pass


class OwnError(Exception):
    def __init__(self, text, code):
        super().__init__(text, code)
        self.code = code


class OwnOSError(OSError):
    pass


class OwnModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(x)


class Method:
    def add(self, number):
        return number

    @staticmethod
    def static(number):
        return number

    @classmethod
    def made(cls):
        return cls()


class Outer:
    class Inner:
        pass


def module_function(x):
    return x


def with_attributes(value, **attributes):
    vars(value).update(attributes)
    return value


def quantized(dtype, axis=None):
    data = torch.arange(8.0).view(2, 4)
    if axis is None:
        return torch.quantize_per_tensor(data, 0.5, 1, dtype)
    size = data.shape[axis]
    return torch.quantize_per_channel(data, torch.arange(1.0, size + 1), torch.zeros(size), axis, dtype)


def storage(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.storage.TypedStorage([1, 2], dtype=dtype)


def strided(array, **flags):
    array.setflags(**flags)
    return array


def nested(count, wrap=lambda inner: [inner]):
    return functools.reduce(lambda inner, _: wrap(inner), range(count), 1)


def shared(value):
    return [value, value, {"again": value}]


@torch.jit.script
def script(x: torch.Tensor) -> torch.Tensor:
    return x


STATE_DICT = torch.nn.Linear(2, 3).state_dict()

PLAIN = {
    "None": None,
    "True": True,
    "int": -5,
    "int of 64 bits": 2**64 - 1,
    "large int": 2**2000 + 1,
    "negative large int": -(2**70),
    "float": 1.5,
    "nan": math.nan,
    "infinity": -math.inf,
    "negative zero": -0.0,
    "complex": 1 + 2j,
    "str": "é🚀",
    "str with NUL": "a\0b",
    "str with lone surrogates": "a\ud800\udcff",
    "bytes": b"\0\xff",
    "large bytes": b"x" * 100_000,
    "bytearray": bytearray(b"abc"),
    "large bytearray": bytearray(100_000),
    "empty bytearray": bytearray(),
    "Ellipsis": ...,
    "NotImplemented": NotImplemented,
    "range": range(1, 10, 3),
    "range of large ints": range(2**100, 2**101, 2**99),
    "slice": slice(1, None, -2),
    "slice of texts": slice("a", "b"),
    "list": [1, [2.5, "x"]],
    "tuple": (1, (2,), ()),
    "dict": {"a": 1, 2: None, (1, "x"): [3]},
    "dict with keys of many kinds": {None: 1, 1.5: 2, b"k": 3, frozenset({1}): 4, Frozen(1): 5, Color.RED: 6},
    "set": {1, "a", (2, 3)},
    "frozenset": frozenset({1, 2}),
    "nested frozensets": frozenset({frozenset({1}), frozenset()}),
    "set of frozen dataclasses": {Frozen(1), Frozen((2, 3))},
    "OrderedDict": collections.OrderedDict(b=1, a=[2]),
    "OrderedDict with another order": with_attributes(collections.OrderedDict(b=1, a=2), note="n"),
    "state dict": STATE_DICT,
    "defaultdict of lists": collections.defaultdict(list, a=[1]),
    "defaultdict without a factory": collections.defaultdict(None, a=1),
    "defaultdict of a listed class": collections.defaultdict(Plain, a=1),
    "defaultdict of a listed function": collections.defaultdict(module_function, a=1),
    "nested defaultdict": collections.defaultdict(dict, a=collections.defaultdict(int, b=1)),
    "Counter": collections.Counter("abca"),
    "deque": collections.deque([1, 2]),
    "deque with a length": collections.deque([1, 2], maxlen=3),
    "empty deque": collections.deque(maxlen=0),
    "date": datetime.date(2026, 2, 28),
    "datetime": datetime.datetime(2026, 2, 28, 1, 2, 3, 4),
    "datetime of UTC": datetime.datetime(2026, 2, 28, tzinfo=UTC),
    "datetime of an offset": datetime.datetime(2026, 2, 28, tzinfo=datetime.timezone(datetime.timedelta(hours=-3))),
    "datetime of a fold": datetime.datetime(2026, 2, 28, fold=1),
    "time": datetime.time(1, 2, 3, 4),
    "time of an offset": datetime.time(1, tzinfo=datetime.timezone(datetime.timedelta(hours=2), "zone"), fold=1),
    "timedelta": datetime.timedelta(-3, 4, 5),
    "timezone": UTC,
    "timezone with a name": datetime.timezone(datetime.timedelta(minutes=90), "zone"),
    "Decimal": decimal.Decimal("-1.50"),
    "Decimal of infinity": decimal.Decimal("-Infinity"),
    "Decimal of nan": decimal.Decimal("NaN"),
    "Fraction": fractions.Fraction(-1, 3),
    "Fraction of large ints": fractions.Fraction(2**100 + 1, 3**50),
    "UUID": uuid.UUID(int=2**127 + 5),
    "random UUID": uuid.uuid4(),
    "PurePosixPath": pathlib.PurePosixPath("/a/b"),
    "PureWindowsPath": pathlib.PureWindowsPath("c:\\a"),
    "Path": pathlib.Path("a/../b"),
    "path of nothing": pathlib.Path(),
    "WorkerInfo": rpc.WorkerInfo("worker7", 7),
}
CLASSES = {
    "member of an Enum": Color.RED,
    "alias of a member": Color.CRIMSON,
    "member with a text": Color.BLUE,
    "member of an IntEnum": Level.LOW,
    "member of an Enum of texts": Text.A,
    "flag": Access.READ,
    "flags": Access.READ | Access.WRITE,
    "no flags": Access(0),
    "IntFlag": Bits.A | Bits.B,
    "NamedTuple": Pair(1, [2]),
    "namedtuple": Point(1, 2),
    "dataclass": Record(1, [2]),
    "frozen dataclass": Frozen((1,)),
    "dataclass with slots": SlottedRecord([1]),
    "frozen dataclass with slots": FrozenSlots([1]),
    "dataclass with keywords": KeywordRecord(value=1),
    "derived dataclass": DerivedRecord(1, 2, 3),
    "object": Plain(a=1, b=[2]),
    "object without attributes": Plain(),
    "object with slots": Slots(1, [2]),
    "object with slots and a dict": with_attributes(SlotsAndDict(1, 2), more=3),
    "object with an empty slot": EmptySlot(),
    "object of an inner class": Outer.Inner(),
    "subclass of int": OwnInt(5),
    "subclass of float": OwnFloat(-0.0),
    "subclass of str": OwnStr("x"),
    "subclass of bytes": OwnBytes(b"x"),
    "subclass of tuple": OwnTuple((1, [2])),
    "subclass of list": OwnList([1, [2]]),
    "subclass of list with an attribute": with_attributes(OwnList([1]), note=2),
    "subclass of dict": OwnDict(a=[1]),
    "subclass of dict with an attribute": with_attributes(OwnDict(a=1), note=2),
    "subclass of set": OwnSet({1}),
    "subclass of frozenset": OwnFrozenSet({1}),
    "subclass of OrderedDict": OwnOrderedDict(b=1, a=2),
    "subclass of deque": OwnDeque([1], 4),
    "subclass of Counter": OwnCounter("aab"),
    "subclass of defaultdict": OwnDefaultDict(list, a=[1]),
    "exception of Python": with_attributes(ValueError("text", 5), note=[1]),
    "OSError": FileNotFoundError(errno.ENOENT, "text", "file"),
    "KeyError": KeyError("k"),
    "UnicodeDecodeError": UnicodeDecodeError("utf-8", b"x", 0, 1, "reason"),
    "exception of a listed class": OwnError("text", 3),
    "OSError of a listed class": OwnOSError(errno.ENOENT, "text", "file"),
    "error of torchrpc": rpc.WorkerLostError("text", "worker7"),
    "module": OwnModule(),
    "module of torch": torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU()),
    "listed function": module_function,
    "listed class": Plain,
    "listed method of a class": Method.add,
    "static method": Method.static,
    "builtin function": len,
    "type of Python": int,
    "type of None": type(None),
    "type of Ellipsis": type(...),
    "object class": object,
    "class of torch": torch.Tensor,
    "class of datetime": datetime.datetime,
    "class of an exception": ValueError,
    "class of an error of torchrpc": rpc.RpcError,
    "Enum class": Color,
    "script function": script,
}
TENSORS = {
    **{
        f"tensor of {str(each)[6:]}": torch.ones(2, 3).to(each)
        for each in (
            torch.bool,
            torch.uint8,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.int64,
            torch.uint16,
            torch.uint32,
            torch.uint64,
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
            torch.complex64,
            torch.complex128,
            torch.float8_e4m3fn,
        )
    },
    "empty tensor": torch.empty(0, 3),
    "tensor without dimensions": torch.tensor(2.5),
    "tensor that requires grad": torch.ones(2, requires_grad=True),
    "transposed tensor": torch.arange(6).view(2, 3).t(),
    "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "parameter without grad": torch.nn.Parameter(torch.ones(2), False),
    "sparse tensor": torch.eye(2).to_sparse(),
    "sparse CSR tensor": torch.eye(2).to_sparse_csr(),
    "quint8": quantized(torch.quint8),
    "qint8": quantized(torch.qint8),
    "qint32": quantized(torch.qint32),
    "quint4x2": quantized(torch.quint4x2),
    "quint2x4": quantized(torch.quint2x4),
    "quint8 by channel": quantized(torch.quint8, 0),
    "qint8 by channel": quantized(torch.qint8, 1),
    "quint4x2 by channel": quantized(torch.quint4x2, 0),
    "UntypedStorage": torch.arange(3.0).untyped_storage(),
    "empty UntypedStorage": torch.UntypedStorage(0),
    "TypedStorage of floats": storage(torch.float32),
    "TypedStorage of ints": storage(torch.int64),
    "TypedStorage of bools": storage(torch.bool),
    "torch.Size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "device": torch.device("cuda:1"),
    "layout": torch.sparse_coo,
    "memory format": torch.channels_last,
    "qscheme": torch.per_channel_affine,
}
ARRAYS = {
    **{
        f"array of {each}": np.arange(6).reshape(2, 3).astype(each)
        for each in (
            "?",
            "i1",
            "i2",
            "i4",
            "i8",
            "u1",
            "u2",
            "u4",
            "u8",
            "f2",
            "f4",
            "f8",
            "g",
            "c8",
            "c16",
            "U3",
            "S3",
            ">i4",
            "M8[s]",
            "m8[ms]",
        )
    },
    "empty array": np.empty((0, 3)),
    "array without dimensions": np.array(5),
    "large array": np.arange(100_000),
    "large array of texts": np.arange(10_000).astype("U8"),
    "Fortran array": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "reversed array": np.arange(6)[::-1],
    "array that is a view": np.arange(10)[2:8:2],
    "read-only array": strided(np.arange(4), write=False),
    **{
        f"np.{kind.__name__}": kind(1)
        for kind in (
            np.bool_,
            np.int8,
            np.int64,
            np.uint32,
            np.float16,
            np.float32,
            np.float64,
            np.complex64,
            np.str_,
        )
    },
    "np.bytes_": np.bytes_(b"a"),
    "np.datetime64": np.datetime64("2026-01-01"),
    "np.timedelta64": np.timedelta64(5, "s"),
    "np.dtype": np.dtype("f4"),
    "np.dtype of texts": np.dtype("U5"),
}
SHAPES = {
    "shared list": shared([1]),
    "shared tuple": shared((1, [2])),
    "shared dict": shared({"a": 1}),
    "shared object": shared(Plain(a=[1])),
    "shared set": shared({1}),
    "shared array": shared(np.arange(3)),
    "shared tensor": shared(torch.ones(2)),
    "shared bytearray": shared(bytearray(b"a")),
    "objects that share a part": [Plain(a=STATE_DICT), Plain(b=STATE_DICT)],
    "lists 900 deep": nested(900),
    "tuples 900 deep": nested(900, lambda inner: (inner,)),
    "dicts 400 deep": nested(400, lambda inner: {"k": [inner]}),
    "objects 400 deep": nested(400, lambda inner: Plain(a=inner)),
    "values of all kinds": [STATE_DICT, {"a": (np.ones(2), {1})}, Record(Color.RED, Pair(1, 2))],
}
KINDS = {**PLAIN, **CLASSES, **TENSORS, **ARRAYS, **SHAPES}


# --- What has arrived ---


class Description:
    """Describes a value by plain data. An object that occurs again gets its number."""

    def __init__(self):
        self.objects, self.kept = {}, []

    def of(self, value):
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, enum.Enum)) or value is None:
            return repr(value), id(value)
        if isinstance(value, (bool, int, float, complex, str, bytes)) and type(value).__module__ == "builtins":
            return type(value), repr(value)
        if id(value) in self.objects:
            return "again", self.objects[id(value)]
        self.objects[id(value)] = len(self.objects)
        self.kept.append(value)  # so that no id is used twice
        slots = [getattr(value, name) for name in ("left", "right") if hasattr(value, name)]
        has_attributes = hasattr(value, "__dict__") and not isinstance(value, torch.Tensor)
        is_described = dataclasses.is_dataclass(value) or isinstance(value, torch.jit.ScriptFunction)
        attributes = vars(value) if has_attributes and not is_described else None
        return type(value), self.contents(value), self.of(slots) if slots else (), self.of(attributes)

    def contents(self, value):
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, np.ndarray):
            is_fortran = value.ndim > 1 and value.flags.f_contiguous
            return value.dtype.str, value.shape, is_fortran, repr(value.tolist())
        if isinstance(value, np.generic):
            return value.dtype.str, repr(value.item())
        if isinstance(value, BaseException):
            return self.of(value.args), getattr(value, "errno", None), getattr(value, "filename", None)
        if isinstance(value, collections.defaultdict):
            return self.of(value.default_factory), [(self.of(k), self.of(v)) for k, v in value.items()]
        if isinstance(value, dict):
            return [(self.of(k), self.of(v)) for k, v in value.items()]
        if isinstance(value, collections.deque):
            return value.maxlen, [self.of(each) for each in value]
        if isinstance(value, (list, tuple)):
            return [self.of(each) for each in value]
        if isinstance(value, (set, frozenset)):
            return sorted(repr(each) for each in value)
        if dataclasses.is_dataclass(value):
            return [self.of(getattr(value, field.name)) for field in dataclasses.fields(value)]
        if isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
            return str(getattr(value, "dtype", "")), list(value)
        if isinstance(value, torch.jit.ScriptFunction):
            return value.qualified_name
        if isinstance(value, datetime.datetime | datetime.time):
            return repr(value), value.fold
        return repr(value) if type(value).__module__ != __name__ or isinstance(value, (int, float, str, bytes)) else ""

    def tensor(self, tensor):
        facts = [str(tensor.dtype), str(tensor.layout), list(tensor.shape), tensor.requires_grad, tensor.is_conj()]
        if tensor.is_quantized:
            return [*facts, str(tensor.qscheme()), tensor.dequantize().tolist()]
        return [*facts, repr(tensor.detach().to_dense().resolve_conj().to(torch.complex128).tolist())]


def described(value):
    for depth in range(1000):  # the description of a deep value would recurse too deeply
        if type(value) in (list, tuple) and len(value) == 1:
            value = value[0]
        elif type(value) is dict and [*value] == ["k"]:
            value = value["k"]
        elif type(value) is Plain and [*vars(value)] == ["a"]:
            value = value.a
        else:
            return depth, Description().of(value)
    raise AssertionError("nested without end")


def echo(*values):
    return values


@pytest.fixture(scope="module")
def group():
    allowed = [f"{__name__}.*", len, script.qualified_name, "torch.nn.Sequential", "torch.nn.Linear", "torch.nn.ReLU"]
    allowed += ["torch.nn.modules.container.Sequential", "torch.nn.modules.linear.Linear"]
    with workers(2, allowed_functions=allowed):
        yield


@pytest.mark.parametrize("name", KINDS)
def test_a_value_of_this_kind_arrives_as_it_was_sent(group, name):
    value = KINDS[name]
    (received,) = rpc.rpc_sync("worker1", echo, args=(value,))
    assert type(received) is type(value) and described(received) == described(value)
    if isinstance(received, np.ndarray):
        assert received.flags.writeable


def test_arguments_share_their_parts(group):
    part = [1]
    first, second = rpc.rpc_sync("worker1", echo, args=(part, {"again": part, "more": {1}}))
    assert first is second["again"]


# --- Random values ---

KEYS = st.one_of(
    st.none(), st.integers(-(2**70), 2**70), st.text(max_size=3), st.floats(), st.uuids(), st.sampled_from([*Color]),
    st.builds(Frozen, st.integers(0, 3)), st.tuples(st.integers(), st.tuples(st.text(max_size=2))),
)  # fmt: skip
LEAVES = st.one_of(
    KEYS, st.complex_numbers(), st.text(st.characters(), max_size=9), st.binary(max_size=9), st.dates(), st.datetimes(),
    st.times(), st.timedeltas(), st.decimals(), st.fractions(), st.sampled_from([..., int, Plain, torch.strided]),
)  # fmt: skip


def containers(inner):
    lists, dicts = st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)
    return st.one_of(
        lists, lists.map(tuple), dicts, st.sets(KEYS), st.frozensets(KEYS), dicts.map(collections.OrderedDict),
        dicts.map(lambda items: collections.defaultdict(list, items)), lists.map(lambda items: OwnDeque(items, 5)),
        lists.map(OwnList), dicts.map(OwnDict), lists.map(OwnTuple), st.builds(Pair, inner, inner),
        st.builds(Record, inner, inner), st.builds(lambda a, b: Plain(a=a, b=b), inner, inner),
        st.builds(Slots, inner, inner), inner.map(lambda value: [value, (value, value)]),
    )  # fmt: skip


class _Everything:
    """Stands for the list of a worker."""

    worker, callers, is_for_member = "worker0", "*", True

    def entry_for(self, name):
        return name

    def record_run(self, name):
        assert isinstance(name, str)


@hypothesis.settings(deadline=None, max_examples=300, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(st.recursive(LEAVES, containers, max_leaves=20))
def test_a_random_value_is_read_as_it_was_written(value):
    found = _C._decode_objects(_C._encode_objects(value, None), _Everything())
    assert type(found) is type(value) and described(found) == described(value)


# --- What is refused ---


def cycle():
    inner = []
    inner.append(inner)
    return inner


class Reduced:
    def __reduce__(self):
        return Reduced, ()


class Stateful:
    def __getstate__(self):
        return {}

    def __setstate__(self, state):
        pass


class Made:
    def __getnewargs__(self):
        return ()


REFUSED = {
    "cycle": (cycle(), "list contains itself"),
    "cycle of objects": ((lambda plain: with_attributes(plain, me=plain))(Plain()), "Plain contains itself"),
    "own __reduce__": (Reduced(), "Reduced is an object of a class with its own __reduce__"),
    "own __getstate__": (Stateful(), "with its own __getstate__"),
    "own __getnewargs__": (Made(), "with its own __getnewargs__"),
    "lambda": (lambda: 1, "has no name at the top level"),
    "method": (Plain().__init__, "its own __reduce__"),
    "partial": (functools.partial(len), "its own __reduce__"),
    "lock": (threading.Lock(), "cannot pickle"),
    "generator": ((number for number in ()), "cannot pickle"),
    "module of TorchScript": (torch.jit.script(torch.nn.ReLU()), "a RecursiveScriptModule is code"),
    "subclass of Tensor": (torch.ones(1).as_subclass(type("Own", (torch.Tensor,), {})), "send value.as_subclass"),
    "parameter with attributes": (with_attributes(torch.nn.Parameter(torch.ones(1)), note=1), "attributes of its own"),
    "array of objects": (np.array([None]), "NumPy's dtype object"),
    "array with fields": (np.zeros(1, "i4,f4"), "send arrays of numbers"),
    "lists 1,100 deep": (nested(1100), "nested too deeply"),
    "huge int": (2 ** (1 << 20), "too many digits"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_is_refused_names_the_class_the_argument_and_the_remedy(group, name):
    value, why = REFUSED[name]
    with pytest.raises(rpc.SerializationError) as raised:
        rpc.rpc_sync("worker1", echo, args=(1, {"key": [value]}))
    text = str(raised.value)
    assert "Cannot send argument 1['key'][0]" in text and "of the call of echo to worker1" in text and why in text
    assert type(value).__qualname__ in text and "[..." not in text


def test_a_result_that_is_refused_names_the_worker(group):
    with pytest.raises(rpc.SerializationError, match=r"worker1 cannot send the result\[0\]\[0\] \(list\): a list con"):
        rpc.rpc_sync("worker1", make_cycle)


def make_cycle():
    return (cycle(),)


class _Unlisted:
    pass


def test_a_class_that_the_receiver_does_not_have_on_its_list_is_refused_there(group):
    for value in (_Unlisted(), _Unlisted):
        with pytest.raises(rpc.NotAllowedError, match=r"worker1 .*\._Unlisted.*allowed_functions=\[\.\.\., "):
            rpc.rpc_sync("worker1", echo, args=(value,))


def give_reduced():
    return Reduced()


def one_list(rank, url):
    allowed = [echo, give_reduced, Plain, Stateful] if rank == 1 else None
    options = rpc.TensorPipeRpcBackendOptions(init_method=url, allowed_functions=allowed)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        assert described(rpc.rpc_sync("worker1", echo, args=(Plain(a=[1]),))) == described((Plain(a=[1]),))
        with pytest.raises(rpc.SerializationError, match="with its own __getstate__"):
            rpc.rpc_sync("worker1", echo, args=(Stateful(),))
        assert type(rpc.rpc_sync("worker1", give_reduced)) is Reduced
    rpc.shutdown()


def test_a_caller_without_a_list_sends_no_pickles_to_a_worker_with_one_and_gets_pickles():
    run_ranks(one_list, 2, f"tcp://127.0.0.1:{free_port()}", init=False)
