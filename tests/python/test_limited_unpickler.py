"""The interpreter of pickles under an allow-list by itself: what it accepts equals what Python's unpickler builds, and
it calls nothing that is not listed, whatever bytes arrive.
"""

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import pickle
import pickletools
import random
import sys
import uuid

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchrpc.rpc as rpc
from torchrpc.rpc import _limited_unpickler, internal
from torchrpc.rpc._errors import NameNotFoundError, NotAllowedError, SerializationError
from torchrpc.rpc._limited_data import StandIn
from torchrpc.rpc._limited_unpickler import LimitedUnpickler
from torchrpc.rpc._pickler import deserialize_allowed


class Allowed:
    """Stands for the list of a worker: `names`, and what begins with one of `prefixes`."""

    worker, callers, is_for_member = "worker0", "*", True

    def __init__(self, *names, prefixes=()):
        self.names, self.prefixes = set(names), prefixes

    def entry_for(self, name):
        return name if name in self.names else next((f"{p}*" for p in self.prefixes if name.startswith(p)), "")


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Comparable:
    def __eq__(self, other):
        return type(self) is type(other) and self.__reduce_ex__(4)[1:3] == other.__reduce_ex__(4)[1:3]

    __hash__ = None


class Plain(Comparable):
    def __init__(self, value):
        self.value = value


class Slotted(Comparable):
    __slots__ = ("__private", "left", "right")

    def __init__(self, left, right):
        self.left, self.right, self.__private = left, right, 1


class SlotsAndDict(Slotted):
    def __init__(self, left, right):
        super().__init__(left, right)
        self.more = left


class WithState(Comparable):
    def __init__(self, value):
        self.value = value

    def __getstate__(self):
        return [self.value]

    def __setstate__(self, state):
        (self.value,) = state


class WithKeywords(Comparable):
    def __new__(cls, *, value):
        made = super().__new__(cls)
        made.value = value
        return made

    def __getnewargs_ex__(self):
        return (), {"value": self.value}


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: tuple = ()


Pair = collections.namedtuple("Pair", "first second")


class OwnList(list):
    pass


class OwnDict(dict):
    pass


class OwnSet(set):
    pass


class OwnError(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.text = text

    def __eq__(self, other):
        return type(self) is type(other) and (self.args, vars(self)) == (other.args, vars(other))

    __hash__ = None


HERE = __name__
LISTED = Allowed("functools.partial", "builtins.len", "builtins.ValueError", prefixes=(f"{HERE}.", "numpy."))


def read(data, allowed=LISTED, **options):
    return LimitedUnpickler(data, allowed, **options).load()


# --- What it accepts ---

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**2000), 2**2000),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(st.characters(), max_size=300),
    st.binary(max_size=300),
    st.builds(bytearray, st.binary(max_size=20)),
    st.dates(),
    st.datetimes(),
    st.datetimes(timezones=st.just(datetime.timezone.utc)),
    st.times(),
    st.timedeltas(),
    st.builds(lambda hours: datetime.timezone(datetime.timedelta(hours=hours), "zone"), st.integers(-23, 23)),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.uuids(),
    st.sampled_from([Color.RED, Color.BLUE, Access.READ, Access.READ | Access.WRITE]),
    st.sampled_from(
        [torch.float32, torch.int8, torch.strided, torch.sparse_coo, torch.contiguous_format, torch.Size([2, 3])]
    ),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:1"), rpc.WorkerInfo("worker7", 7), ..., NotImplemented]),
    st.sampled_from([int, list, object, torch.Tensor, datetime.date, Plain, Color, type(None), len, rpc.RpcError]),
    st.builds(range, st.integers(), st.integers(), st.integers(1)),
    st.builds(slice, st.integers(), st.none() | st.integers()),
    st.builds(pathlib.PurePosixPath, st.sampled_from(["/a/b", "a", "."])),
    st.builds(pathlib.Path, st.sampled_from(["/a/b", "a", "."])),
    st.builds(OwnError, st.text(max_size=5)),
)
keys = st.one_of(
    st.integers(), st.text(max_size=5), st.tuples(st.integers(), st.tuples(st.text(max_size=3))), st.uuids()
)


def containers(inner):
    lists = st.lists(inner, max_size=5)
    dicts = st.dictionaries(keys | st.builds(Point, st.integers(), st.tuples(st.integers())), inner, max_size=5)
    return st.one_of(
        lists,
        lists.map(tuple),
        dicts,
        st.sets(keys),
        st.frozensets(keys),
        dicts.map(collections.OrderedDict),
        dicts.map(lambda items: collections.defaultdict(list, items)),
        st.lists(keys).map(collections.Counter),
        lists.map(collections.deque),
        lists.map(lambda items: collections.deque(items, maxlen=10)),
        lists.map(OwnList),
        dicts.map(OwnDict),
        st.sets(keys).map(OwnSet),
        st.builds(Pair, inner, inner),
        st.builds(Plain, inner),
        st.builds(Slotted, inner, inner),
        st.builds(SlotsAndDict, inner, inner),
        st.builds(WithState, inner),
        st.builds(lambda value: WithKeywords(value=value), inner),
        inner.map(lambda value: [value, value]),
    )


values = st.recursive(leaves, containers, max_leaves=20)
slow_is_fine = settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))


@slow_is_fine
@given(values, st.sampled_from([4, 5]))
def test_what_it_accepts_equals_what_python_reads(value, protocol):
    data = pickle.dumps(value, protocol)
    found, expected = read(data), pickle.loads(data)
    assert type(found) is type(expected) and found == expected == value
    assert pickle.dumps(found, protocol) == pickle.dumps(expected, protocol)  # it shares the same parts, too


@slow_is_fine
@given(
    st.recursive(leaves.filter(lambda value: value is not torch.contiguous_format), st.lists), st.sampled_from([2, 3])
)
def test_it_reads_protocols_2_and_3(value, protocol):
    data = pickle.dumps(value, protocol)
    assert read(data) == pickle.loads(data) == value


def round_trip(value, allowed=LISTED):
    return deserialize_allowed(*internal.serialize(value), allowed)


def test_it_reads_what_torchrpc_pickles():
    tensor = torch.ones(3)
    storage = tensor.untyped_storage()
    integers = torch.arange(4.0).view(2, 2)
    quantized = torch.quantize_per_channel(integers, torch.tensor([0.1, 0.2]), torch.tensor([0, 3]), 0, torch.quint8)
    found = round_trip([tensor, tensor, torch.nn.Parameter(tensor, False), storage, quantized, bytearray(10_000)])
    assert found[0] is found[1] is tensor
    assert (
        type(found[2]) is torch.nn.Parameter and not found[2].requires_grad and found[2].data_ptr() == tensor.data_ptr()
    )
    assert found[3].data_ptr() == storage.data_ptr() and torch.equal(found[4].dequantize(), quantized.dequantize())
    assert found[5] == bytearray(10_000)


def test_state_dicts_keep_their_metadata():
    state = torch.nn.Linear(1, 1).state_dict()
    found = round_trip(state)
    assert type(found) is collections.OrderedDict and found._metadata == state._metadata


@pytest.mark.parametrize(
    "array",
    [
        np.arange(3),
        np.arange(10_000.0).reshape(100, 100),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array([None, "text", 1], dtype=object),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.array(["a", "bc"]),
    ],
)
def test_arrays_pass_if_numpy_is_listed(array):
    found = round_trip([array])[0]
    assert found.dtype == array.dtype and np.array_equal(found, array)
    assert round_trip(np.float32(1.5)) == np.float32(1.5)
    with pytest.raises(NotAllowedError, match=r"run or send numpy"):
        round_trip(array, Allowed())


def test_objects_that_refer_to_themselves():
    items = []
    items.append(items)
    pair = ([],)
    pair[0].append(pair)
    thing = Plain(None)
    thing.value = {"self": thing}
    found = round_trip([items, pair, thing])
    assert found[0][0] is found[0] and found[1][0][0] is found[1] and found[2].value["self"] is found[2]


def test_partials_and_exceptions_of_listed_classes():
    assert round_trip(functools.partial(len, [1, 2]))() == 2
    error = ValueError("text")
    error.note = {1}
    found = round_trip(error)
    assert type(found) is ValueError and found.args == ("text",) and found.note == {1}


def test_an_error_of_torchrpc_keeps_its_attributes():
    found = round_trip(rpc.WorkerLostError("text", "worker7"))
    assert type(found) is rpc.WorkerLostError and (str(found), found.worker) == ("text", "worker7")


@pytest.mark.parametrize("exception", [NameNotFoundError, ModuleNotFoundError])
def test_a_listed_name_that_is_missing_is_named(exception):
    data = pickle.dumps(Plain(1)).replace(b"Plain", b"Plane").replace(HERE.encode(), b"test_limited_unpickler")
    if exception is ModuleNotFoundError:
        data = pickle.dumps(Plain(1)).replace(HERE.encode(), HERE.encode()[:-1] + b"_")
    with pytest.raises(exception, match=r"Functions and classes travel by name|has no Plane in its module"):
        read(data, Allowed(prefixes=("test_",)))


# --- What it calls ---


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="the names of parameters are those of 3.13")
def test_the_table_has_only_opcodes_that_pythons_pickler_writes():
    names = {_limited_unpickler._OPCODE_NAMES[opcode] for opcode in _limited_unpickler._HANDLERS}
    refused = "INST OBJ EXT1 EXT2 EXT4 PERSID BINPERSID GET PUT INT LONG FLOAT STRING BINSTRING UNICODE LIST DICT DUP"
    assert not names & set(refused.split())
    assert names | {"MEMOIZE", "BINGET", "STOP"} <= {opcode.name for opcode in pickletools.opcodes}


PROGRAM = """
import random, sys
sys.path.insert(0, {folder!r})
import test_limited_unpickler as t
t.watch_random_programs({seed}, {count})
"""


@pytest.mark.parametrize("seed", range(4))
def test_random_programs_call_nothing_that_is_not_listed(run_python, tmp_path, seed):
    script = tmp_path / "programs.py"
    script.write_text(PROGRAM.format(folder=str(pathlib.Path(__file__).parent), seed=seed, count=3000))
    result = run_python(script)
    counts = dict(part.split("=") for part in result.stdout.split())
    assert int(counts["read"]) > 30, "some programs must be valid, or the test shows nothing"


class Trap(Exception):
    pass


def trap(*args):
    """Not listed. Mutated programs have its name, among others."""
    raise Trap


def listed_function(*args):
    return args


TRAPS = ["os.system", "builtins.eval", "builtins.getattr", "builtins.setattr", f"{HERE}.trap", "posix.getpid"]
TABLE = (
    *("builtins.set", "builtins.bytearray", "builtins.object", "builtins.list", "builtins.type", "torch.Tensor"),
    *("collections.OrderedDict", "collections.deque", "collections.defaultdict", "datetime.date", "uuid.UUID"),
    *("fractions.Fraction", "decimal.Decimal", "torch.Size", "torch.device", "torch.serialization._get_layout"),
    *("torch._utils._rebuild_parameter", "torchrpc.rpc.internal.PythonUDF", "torchrpc._C.WorkerInfo"),
    *("torchrpc.nn.remote_module._run_forward", "torchrpc.rpc._pickler._tensor", "torchrpc.rpc.RpcError"),
    *(f"{HERE}.Plain", f"{HERE}.Slotted", f"{HERE}.WithState", f"{HERE}.Pair", f"{HERE}.Color", f"{HERE}.Point"),
    *(f"{HERE}.listed_function", f"{HERE}.OwnDict", f"{HERE}.OwnList", f"{HERE}.OwnError"),
)
WATCHED = Allowed(*(name for name in TABLE if name.startswith(HERE)))


def _code_for(generator, name):
    module, _, function = name.rpartition(".")
    parts = [b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, function)]
    return b"".join(parts) + b"\x93" if generator.random() < 0.9 else f"c{module}\n{function}\n".encode()


def _random_program(generator):
    """Return opcodes in an order that often is valid."""
    pieces = [b"N", b"\x88", b"K\x05", b")", b"]", b"}", b"\x8f", b"(", b"\x8c\x01a", b"C\x04abcd", b"\x8a\x01\x05"]
    actions = [
        b"R",
        b"R",
        b"R",
        b"b",
        b"b",
        b"\x81",
        b"\x81",
        b"\x92",
        b"\x85",
        b"\x86",
        b"\x87",
        b"t",
        b"a",
        b"e",
        b"s",
    ]
    actions += [b"u", b"\x90", b"\x91", b"0", b"1", b"\x94", b"h\x00", b"h\x01", b"h\x02", b"q\x00", b"\x97", b"\x98"]
    code = b""
    for _ in range(generator.randrange(1, 12)):
        draw = generator.random()
        if draw < 0.35:
            code += _code_for(generator, generator.choice(TABLE if draw < 0.3 else TRAPS))
            code += generator.choice([b"", b"", b"\x94", b")R", b")\x81", b"K\x01\x85R", b"\x8c\x01a\x85R", b"}b"])
        else:
            code += generator.choice(pieces if draw < 0.6 else actions)
    return code + b"."


def _mutated(generator, data):
    data = bytearray(data)
    for _ in range(generator.randrange(1, 3)):
        at = generator.randrange(len(data))
        draw = generator.random()
        if draw < 0.4:
            data[at] = generator.choice([generator.randrange(256), *b"Rb\x81\x92h\x94su0(t\x85\x86"])
        elif draw < 0.6:
            del data[at : at + generator.randrange(1, 5)]
        elif draw < 0.8:
            data[at:at] = generator.choice(
                [b"R", b"b", b")R", b")\x81", b"}b", _code_for(generator, generator.choice(TRAPS))]
            )
        else:
            end = at + generator.randrange(1, 20)
            data[at:at] = data[at:end]
    return bytes(data)


SAMPLES = [
    [Plain([1]), Slotted(1, (2,)), WithState({3})],
    {"a": Pair(1, Color.RED), "b": OwnDict(x=OwnList([1, 2]))},
    [datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc), decimal.Decimal("1.5"), fractions.Fraction(1, 3)],
    [uuid.UUID(int=5), collections.deque([1], 3), collections.OrderedDict(a={1}), collections.defaultdict(list, a=[1])],
    [torch.Size([1]), torch.device("cpu"), torch.strided, torch.float32, rpc.WorkerInfo("a", 1), OwnError("text")],
]
# Modules whose Python functions the reader, its constructors and the listed classes may run.
EXPECTED_FILES = ("_limited_unpickler", "_limited_data", "_allow_list", "_names", "_errors", HERE)
STANDARD_FILES = (
    "collections",
    "contextlib",
    "datetime",
    "_pydecimal",
    "fractions",
    "uuid",
    "enum",
    "dataclasses",
    "struct",
    "codecs",
)


def watch_random_programs(seed, count):
    """In a child process: end it if a program calls something unexpected."""
    generator = random.Random(seed)
    unexpected, watching = [], False
    harmless = (
        "sys.setprofile",
        "object.__getattr__",
        "object.__setattr__",
        "sys._getframe",
        "import",
        "compile",
        "builtins.id",
        "gc.",
    )

    def audit(event, args):
        if watching and not event.startswith(harmless):
            unexpected.append(f"event {event} {args}")

    def profile(frame, event, arg):
        if event == "call":
            file = frame.f_code.co_filename
            stem = pathlib.PurePath(file).parent.name if file.endswith("__init__.py") else pathlib.PurePath(file).stem
            if stem not in EXPECTED_FILES + STANDARD_FILES and not file.startswith("<"):
                unexpected.append(f"{file}: {frame.f_code.co_qualname}")
        elif event == "c_call" and arg in (eval, exec, compile, __import__, open, setattr, delattr):
            unexpected.append(f"{arg} from {frame.f_code.co_qualname}")

    sys.addaudithook(audit)
    samples = [pickle.dumps(sample, protocol) for sample in SAMPLES for protocol in (2, 4, 5)]
    for sample in samples:
        read(sample, WATCHED)  # what a first use imports
    outcomes = collections.Counter()
    for number in range(count):
        data = _random_program(generator) if number % 2 else _mutated(generator, generator.choice(samples))
        options = {"is_call": number % 7 == 0, "is_exception": number % 5 == 0}
        tensors = [torch.ones(1)]
        helpers = {"torchrpc.rpc._pickler._tensor": StandIn("_tensor", lambda reader, args: reader.tensors[args[0]])}
        reader = LimitedUnpickler(
            data, WATCHED, tensors=tensors, buffers=[memoryview(b"x")], helpers=helpers, **options
        )
        try:
            watching = True
            sys.setprofile(profile)
            try:
                reader.load()
            finally:
                sys.setprofile(None)
                watching = False
            outcomes["read"] += 1
        except Trap:
            unexpected.append("trap")
        except Exception as exc:
            outcomes[type(exc).__name__] += 1
            # The constructors of listed classes may raise their own errors.
            if not isinstance(exc, (NotAllowedError, SerializationError, NameNotFoundError)):
                assert reader._runs_listed_code, (data, exc)
        if unexpected:
            sys.exit(f"{data!r} calls {unexpected}")
    print(*(f"{outcome}={count}" for outcome, count in outcomes.items()))
