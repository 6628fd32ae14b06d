"""Values of all kinds through torch's own RPC and through torchrpc: what arrives is the same.

Each of the two systems has a group of two processes. hypothesis draws a value; both systems send it as an argument,
where a function describes what has arrived, and as a result. `VALUES_EXAMPLES=100000` draws more values, other ones
each time.
"""

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import importlib
import math
import os
import pathlib
import re
import sys
import threading
import uuid
import warnings

import hypothesis
import numpy as np
import pytest
import torch
import torch.distributed.rpc as torch_rpc
from hypothesis import strategies as st

import torchrpc.rpc as our_rpc
from torchrpc.testing import start_process

EXAMPLES = int(os.environ.get("VALUES_EXAMPLES", "0"))
settings = hypothesis.settings(
    max_examples=EXAMPLES or 1500,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)


# --- Types of scripts ---


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"


class Flags(enum.IntFlag):
    A = 1
    B = 2


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Record:
    first: object
    second: object = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: object


class Slots:
    __slots__ = ("a", "b")

    def __init__(self, a, b):
        self.a, self.b = a, b


class Plain:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Reduced:
    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return Reduced, (self.value,)


class OddError(Exception):
    def __init__(self, text, code):
        super().__init__(text, code)
        self.code = code


class Subclass(torch.Tensor):
    pass


def module_function(x):
    return x


# --- What has arrived ---


class Description:
    """Describes a value by plain data; the same objects, and tensors that share memory, get the same numbers."""

    def __init__(self):
        self.objects, self.storages, self.kept = {}, {}, []

    def of(self, value):
        if isinstance(value, (bool, int, float, complex, str, bytes, type(None))) and not isinstance(value, enum.Enum):
            return type(value).__name__, repr(value)
        if id(value) in self.objects and not isinstance(value, (enum.Enum, torch.dtype, torch.device)):
            return "again", self.objects[id(value)]
        self.objects[id(value)] = len(self.objects)
        self.kept.append(value)  # so that no id is used twice
        return (type(value).__qualname__, *self.contents(value))

    def contents(self, value):
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, value.flags.writeable, repr(value.tolist())
        if isinstance(value, np.generic):
            return value.dtype.str, repr(value.item())
        if isinstance(value, collections.defaultdict):
            return repr(value.default_factory), [(self.of(k), self.of(v)) for k, v in value.items()]
        if isinstance(value, dict):
            return [(self.of(k), self.of(v)) for k, v in value.items()]
        if isinstance(value, collections.deque):
            return value.maxlen, [self.of(each) for each in value]
        if isinstance(value, (list, tuple)):
            return [self.of(each) for each in value]
        if isinstance(value, (set, frozenset)):
            return sorted(repr(each) for each in value)
        if isinstance(value, BaseException):
            return [self.of(each) for each in value.args], self.of(vars(value))
        if isinstance(value, Slots):
            return self.of(value.a), self.of(value.b)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return [self.of(getattr(value, field.name)) for field in dataclasses.fields(value)]
        if hasattr(value, "__dict__") and type(value).__module__ == __name__:
            return self.of(vars(value))
        if isinstance(value, torch.TypedStorage):
            return str(value.dtype), repr(value.tolist())
        return (re.sub(" at 0x[0-9a-f]+", "", repr(value)),)  # addresses are those of a process

    def tensor(self, tensor):
        facts = [str(tensor.dtype), str(tensor.layout), list(tensor.shape), tensor.requires_grad, tensor.is_leaf]
        facts += [tensor.device.type, tensor.is_conj(), tensor.is_neg()]
        detached = tensor.detach()
        if tensor.device.type == "meta":
            return facts
        if tensor.is_quantized:
            return [*facts, str(tensor.qscheme()), repr(detached.dequantize().tolist())]
        if tensor.layout != torch.strided:
            return [*facts, repr(detached.to_dense().tolist())]
        if tensor.numel() > 0:
            storage = tensor.untyped_storage().data_ptr()
            facts.append(self.storages.setdefault(storage, len(self.storages)))
        plain = detached.resolve_conj().resolve_neg()
        if plain.is_complex():
            return [*facts, repr(torch.view_as_real(plain.to(torch.complex64)).tolist())]
        return [*facts, repr(plain.to(torch.float64 if plain.is_floating_point() else plain.dtype).tolist())]


def describe(value):
    return Description().of(value)


def same(value):
    return value


# --- Values ---

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
DIFFERENTIABLE = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}


@st.composite
def bases(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = math.prod(shape)
    return torch.arange(count, dtype=torch.float64).mul(draw(st.integers(1, 3))).to(dtype).reshape(shape)


VIEWS = ["transpose", "slice", "step", "expand", "select", "flat", "detach", "alias", "bits"]
TENSORS = ["plain"] * 6 + ["grad", "parameter", "buffer", "subclass", "coo", "quantized", "channel"]


@st.composite
def views(draw, base):
    """A view of the base, or the base itself."""
    if base.numel() == 0:
        return base  # torch's process is aborted by a view of an empty storage that begins behind it
    kind = draw(st.sampled_from(["same", *VIEWS]))
    if kind == "transpose" and base.dim() > 1:
        return base.transpose(0, 1)
    if kind == "slice" and base.dim() > 0 and base.size(0) > 1:
        return base[1:]
    if kind == "step" and base.dim() > 0:
        return base[::2]
    if kind == "expand":
        return base.unsqueeze(0).expand(draw(st.integers(1, 3)), *base.shape)
    if kind == "select" and base.dim() > 0 and base.size(0) > 0:
        return base[0]
    if kind == "flat":
        return base.view(-1)
    if kind == "detach":
        return base.detach()
    if kind == "alias":
        return base.view(base.shape)
    if kind == "bits" and base.is_complex():
        return base.conj()
    return base


@st.composite
def tensors(draw):
    tensor = draw(views(draw(bases())))
    kind = draw(st.sampled_from(TENSORS))
    if kind == "grad" and tensor.dtype in DIFFERENTIABLE:
        return tensor.detach().clone().requires_grad_()
    if kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=tensor.dtype in DIFFERENTIABLE and draw(st.booleans()))
    if kind == "buffer":
        return torch.nn.Buffer(tensor)
    if kind == "subclass":
        return tensor.as_subclass(Subclass)
    if kind == "coo" and tensor.dtype in (torch.float32, torch.float64, torch.int64) and tensor.dim() > 0:
        return tensor.to_sparse()
    if kind == "quantized" and tensor.dtype == torch.float32:
        return torch.quantize_per_tensor(tensor, 0.1, 10, torch.quint8)
    if kind == "channel" and tensor.dtype == torch.float32 and tensor.dim() > 1:
        scales = torch.full((tensor.size(0),), 0.5)
        return torch.quantize_per_channel(
            tensor, scales, torch.zeros(tensor.size(0), dtype=torch.int64), 0, torch.qint8
        )
    return tensor


@st.composite
def tensors_that_share(draw):
    base = draw(bases())
    return [draw(views(base)) for _ in range(draw(st.integers(2, 4)))]


@st.composite
def arrays(draw):
    dtype = draw(st.sampled_from(["i1", "u2", "i4", "f2", "f4", "f8", "c8", "?", "U3", "S3", "M8[s]", "O"]))
    array = np.arange(draw(st.sampled_from([0, 1, 6, 6000]))).astype("i8" if dtype == "M8[s]" else dtype).astype(dtype)
    if draw(st.booleans()) and array.size % 2 == 0:
        array = array.reshape(2, -1)
    if draw(st.booleans()):
        array = array[::-1]
    if draw(st.booleans()):
        array.flags.writeable = False
    return array


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.complex_numbers(allow_nan=False),
    st.text(max_size=5),
    st.text(alphabet="a\ud800\udcff", max_size=3),
    st.binary(max_size=5),
    st.sampled_from([*Color, Flags.A | Flags.B, torch.float32, torch.device("cpu"), torch.Size([2, 3]), torch.strided]),
    st.sampled_from([math.inf, math.nan, -0.0, 2**63, -(2**63), 2**63 - 1, ..., NotImplemented, int, module_function]),
    st.sampled_from([datetime.datetime(2026, 1, 2), datetime.timedelta(3), decimal.Decimal("1.50"), uuid.UUID(int=5)]),
    st.sampled_from([fractions.Fraction(1, 3), pathlib.PurePosixPath("/a/b"), range(3), slice(1, 2)]),
    st.sampled_from(
        [np.int64(3), np.bool_(True), np.datetime64("2026-01-01"), torch.sum, math.sin, "x" * 5000, b"y" * 5000]
    ),
)
keys = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.sampled_from([Color.RED, (1, "a"), 2.5, b"k"]))


def cyclic(inner):
    inner = list(inner)
    inner.append(inner)
    return inner


def cyclic_record(inner):
    record = Record(inner)
    record.second = {"self": record}
    return record


def containers(inner):
    items = st.lists(inner, max_size=4)
    return st.one_of(
        items,
        items.map(tuple),
        items.map(collections.deque),
        items.map(cyclic),
        inner.map(cyclic_record),
        inner.map(lambda x: [x, x, (x,)]),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(keys, inner, max_size=3).map(lambda d: collections.defaultdict(list, d)),
        st.builds(Point, inner, inner),
        st.builds(Record, inner, inner),
        st.builds(Frozen, inner),
        st.builds(Slots, inner, inner),
        st.builds(Plain, a=inner, b=inner),
        st.builds(Reduced, inner),
        st.builds(lambda x: ValueError("text", x), inner),
        st.builds(lambda x: OddError("text", x), inner),
        st.sets(keys, max_size=3),
        st.frozensets(keys, max_size=3),
        st.binary(max_size=5).map(bytearray),
    )


values = st.recursive(st.one_of(scalars, tensors(), tensors_that_share(), arrays()), containers, max_leaves=6)


# --- The two systems ---


class Group:
    """This process and a worker in a process of its own, `other`, in a group of one of the two systems."""

    def __init__(self, rpc, name, folder):
        self.rpc, self.name, self.folder = rpc, name, folder
        self.groups = 0
        self.is_usable = True
        self.start()

    def start(self):
        self.groups += 1
        store = f"{self.folder}/{self.name}{self.groups}"
        self.process = start_process(serve, self.rpc.__name__, store)
        join(self.rpc, 0, store)

    def call(self, function, *args, **kwargs):
        return self.rpc.rpc_sync("other", function, args=args, kwargs=kwargs)

    def restart(self):
        """Start again. torch's RPC may hang there, where no signal reaches it: then it is not used any more."""
        self.process.kill()
        self.process.join()
        self.rpc.shutdown(graceful=False)
        starter = threading.Thread(target=self.start, daemon=True)
        starter.start()
        starter.join(START_LIMIT_S)
        self.is_usable = not starter.is_alive()
        if not self.is_usable:
            warnings.warn(f"{self.name}'s RPC does not start again: the rest is not compared with it", stacklevel=1)

    def leave(self):
        if self.is_usable:
            self.rpc.shutdown()
            self.process.join(20)
        self.process.kill()


def join(rpc, rank, store):
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(["this", "other"][rank], rank=rank, world_size=2, rpc_backend_options=options)


def serve(module, store):
    rpc = importlib.import_module(module)
    join(rpc, 1, store)
    rpc.shutdown()


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    both = Group(torch_rpc, "torch", folder), Group(our_rpc, "ours", folder)
    yield both
    for group in both:
        group.leave()


def outcome(act):
    try:
        return act(), None
    except Exception as error:
        return None, error


# Values that end a worker of torch's RPC, of all that are drawn. More of them would leave too little to compare with.
MOST_RESTARTS = 20
START_LIMIT_S = 60


def compare(groups, through):
    """torch's value is ours. What torch refuses, or what ends its worker, may arrive; it does not end ours."""
    theirs, ours = groups
    if not theirs.is_usable:
        outcome(lambda: through(ours))
        assert ours.call(same, 5) == 5
        return
    expected, refusal = outcome(lambda: through(theirs))
    found, error = outcome(lambda: through(ours))
    if refusal:
        assert ours.call(same, 5) == 5
        if outcome(lambda: theirs.call(same, 5)) != (5, None):
            theirs.restart()
            assert theirs.groups <= MOST_RESTARTS, refusal
        return
    assert error is None, f"torch sends it, torchrpc does not: {error!r}"
    assert found == expected


# The errors come first: values that end torch's worker follow, and torch's RPC may not start again after one.
def fail_because_of_another():
    try:
        raise KeyError("first")
    except KeyError as cause:
        raise ValueError("outer\nline") from cause


def fail_instead_of_another():
    try:
        raise KeyError("first")
    except KeyError:
        raise TypeError("outer") from None


def fail_with_two_arguments():
    raise UnicodeDecodeError("utf-8", b"x", 0, 1, "reason") from OddError("text", 5)


def fail_in_a_group():
    raise ExceptionGroup("several", [KeyError("a"), ValueError("b")])  # noqa: F821  tested with Python 3.11


@pytest.mark.parametrize(
    "function", [fail_because_of_another, fail_instead_of_another, fail_with_two_arguments, fail_in_a_group]
)
def test_an_error_with_links_has_the_type_and_text_of_torchs(groups, function):
    if function is fail_in_a_group and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no groups of exceptions")
    theirs, ours = (outcome(lambda group=group: group.call(function))[1] for group in groups)
    assert isinstance(ours, type(theirs))
    # torch's text begins with the name of the type a second time, and ends with a traceback of the caller.
    assert "\n".join(str(ours).splitlines()[:3]) in str(theirs)


@settings
@hypothesis.given(value=values)
def test_an_argument_arrives_as_with_torch(groups, value):
    compare(groups, lambda group: group.call(describe, value))


@settings
@hypothesis.given(value=values)
def test_a_result_arrives_as_with_torch(groups, value):
    compare(groups, lambda group: describe(group.call(same, value)))


@hypothesis.settings(settings, max_examples=settings.max_examples // 5)
@hypothesis.given(args=st.lists(values, max_size=4), kwargs=st.dictionaries(st.sampled_from("abc"), values, max_size=3))
def test_arguments_share_objects_as_with_torch(groups, args, kwargs):
    compare(groups, lambda group: group.call(describe_all, *args, **kwargs))


def describe_all(*args, **kwargs):
    return describe([args, kwargs])
