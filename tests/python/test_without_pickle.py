"""Groups with `pickle="off"`: plain data, and objects of registered and listed classes; pickles in no direction."""

import dataclasses
import enum
import pickle
import re
import threading
from typing import NamedTuple

import pytest
import torch
from waiting import eventually

import torchrpc.rpc as rpc
from torchrpc import autograd as dist_autograd
from torchrpc.nn import RemoteModule
from torchrpc.optim import DistributedOptimizer
from torchrpc.rpc import NotAllowedError, SerializationError
from torchrpc.rpc._values import exceptions, pickler
from torchrpc.testing import free_port, run_ranks, workers

made = []


@rpc.register_data_class
@dataclasses.dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    label: int = 0
    parts: list = dataclasses.field(default_factory=list)
    size: int = dataclasses.field(init=False, default=7)

    def __post_init__(self):
        if self.label < 0:
            raise ValueError("no such label")


@rpc.register_data_class
class Pair(NamedTuple):
    first: object
    second: object


@rpc.register_data_class
class Color(enum.Enum):
    RED = 1


@rpc.register_data_class
class State:
    def __init__(self):
        made.append(1)
        self.values = {1: (2, 3)}


@dataclasses.dataclass
class Unregistered:
    value: object = None


@rpc.register_data_class
class OwnError(Exception):
    pass


class Evil:
    def __reduce__(self):
        return made.append, (1,)


def echo(*values, **named):
    return (*values, named) if named or len(values) != 1 else values[0]


def count_made():
    return len(made)


def fail(kind):
    raise {"own": OwnError, "value": ValueError, "lost": rpc.RpcError}[kind]("text")


def fail_to_open():
    raise FileNotFoundError(2, "text", "file")


def give_lambda():
    return lambda: 1


def give_unregistered():
    return [Unregistered()]


def no_pickles():
    """From now on, this process can neither write nor read a pickle for a message."""

    def refuse(*args, **kwargs):
        raise AssertionError("a pickle")

    pickler._Pickler.__init__ = refuse
    for name in ("dumps", "_TypeUnpickler"):
        setattr(exceptions, name, refuse)


@pytest.fixture(scope="module")
def group():
    with workers(2, pickle="off") as names:
        rpc.rpc_sync("worker1", no_pickles)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pickler, "_Pickler", None)
            yield names


SAMPLE = Sample(torch.ones(2), 3, [1, (2, "x")])


@pytest.mark.parametrize(
    "value",
    [
        (),
        (1, (2, [3, {"t": ("t", "o")}])),
        {1, 2},
        frozenset([(1, 2)]),
        2**100,
        -(2**64),
        torch.Size([2, 3]),
        Pair(1, [Pair(2, None)]),
        Color.RED,
        {Color.RED: Color},
        [list(range(3)) for _ in range(200)],
        rpc.WorkerInfo("x", 3),
        echo,
        b"bytes",
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", str(value)),
)
def test_values_arrive_as_they_were_sent(group, value):
    for sent in (value, {"nested": [value, {1}]}):
        received = rpc.rpc_sync("worker1", echo, args=(sent,))
        assert received == sent and type(received) is type(sent)


def test_a_dataclass_arrives_through_its_constructor(group):
    received = rpc.rpc_sync("worker1", echo, args=(SAMPLE,), kwargs={"named": [SAMPLE]})
    for sample in (received[0], received[1]["named"][0]):
        assert type(sample) is Sample
        assert (sample.image.tolist(), sample.label, sample.parts, sample.size) == ([1, 1], 3, [1, (2, "x")], 7)
    with pytest.raises(ValueError, match="no such label"):
        bad = object.__new__(Sample)
        vars(bad).update(vars(SAMPLE), label=-1)
        rpc.rpc_sync("worker1", echo, args=(bad,))


def test_an_object_keeps_its_fields_and_no_constructor_runs(group):
    before = rpc.rpc_sync("worker1", count_made)
    received = rpc.rpc_sync("worker1", echo, args=(State(),))
    assert type(received) is State and vars(received) == {"values": {1: (2, 3)}}
    assert rpc.rpc_sync("worker1", count_made) == before


def test_rrefs_and_tensors_travel_in_objects(group):
    rref = rpc.remote("worker1", torch.ones, args=([2],))
    received = rpc.rpc_sync("worker1", echo, args=(Pair(rref, {torch.float32}),))
    assert received.first.to_here().tolist() == [1, 1] and received.second == {torch.float32}
    assert rref._get_type() is torch.Tensor


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((1, [2, {"key": Unregistered()}]), {}, r"argument 1\[1\]\['key'\] \(Unregistered\).*register_data_class"),
        ((), {"name": lambda: 1}, r"argument 'name' of the call of echo to worker1: .*lambda.* has no name"),
        (
            (Sample(torch.ones(1), 1, [Evil()]),),
            {},
            r"argument 0\.parts\[0\] \(Evil\).*create the object",
        ),
        (({1: {Evil()}},), {}, r"argument 0\[1\] \(an element\)"),
    ],
)
def test_what_cannot_be_sent_is_named(group, args, kwargs, words):
    with pytest.raises(SerializationError, match=words):
        rpc.rpc_sync("worker1", echo, args=args, kwargs=kwargs)


def test_what_contains_itself_is_refused(group):
    cycle: list = []
    cycle.append(cycle)
    with pytest.raises(SerializationError, match="contains itself"):
        rpc.rpc_sync("worker1", echo, args=(cycle,))


def test_a_function_without_a_name_is_refused(group):
    for function in (lambda: 1, State().__init__, Evil):
        if function is Evil:
            assert rpc.remote("worker1", Evil).owner_name() == "worker1"  # by its name
            continue
        with pytest.raises(SerializationError, match="functions are sent by name"):
            rpc.rpc_sync("worker1", function)


@pytest.mark.parametrize("give", [give_lambda, give_unregistered])
def test_a_result_that_cannot_be_sent_is_an_error(group, give):
    with pytest.raises(SerializationError, match=r"worker1 cannot send the result"):
        rpc.rpc_sync("worker1", give)


@pytest.mark.parametrize(("kind", "error"), [("own", OwnError), ("value", ValueError), ("lost", rpc.RpcError)])
def test_exceptions_keep_their_type(group, kind, error):
    with pytest.raises(error, match="text"):
        rpc.rpc_sync("worker1", fail, args=(kind,))


def test_exceptions_keep_their_arguments(group):
    with pytest.raises(FileNotFoundError) as raised:
        rpc.rpc_sync("worker1", fail_to_open)
    assert (raised.value.errno, raised.value.filename) == (2, "file")


def test_modules_and_optimizers_work(group):
    module = RemoteModule("worker1", torch.nn.Linear, args=(2, 1))
    for kind in (torch.optim.SGD, torch.optim.ASGD):
        weight, bias = module.remote_parameters()
        before = weight.to_here()
        optimizer = DistributedOptimizer(kind, [weight, bias], lr=0.1)
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [module(torch.ones(1, 2)).sum()])
            optimizer.step(context)
        assert torch.allclose(weight.to_here(), before - 0.1, atol=1e-3)


joined = threading.Event()


def say_joined():
    joined.set()


def without_pickles(rank, url):
    no_pickles()
    options = rpc.TensorPipeRpcBackendOptions(init_method=url)
    assert options.pickle == "off"
    rpc.init_rpc(f"worker{rank}", rank=rank, rpc_backend_options=options)
    assert rpc.rpc_sync(f"worker{rank}", echo, args=({1},)) == {1}
    if rank == 1:
        eventually(lambda: any(worker.name == "worker0" for worker in rpc.get_worker_infos()))  # it may join second
        rpc.rpc_sync("worker0", say_joined)
    assert rank == 1 or joined.wait(30)
    rpc.shutdown()


def test_a_group_that_grows_joins_and_leaves_without_pickles():
    env = {"TORCHRPC_PICKLE": "off"}
    run_ranks(without_pickles, 2, f"tcp://127.0.0.1:{free_port()}", init=False, env=env)


# --- What others may send ---


def one_pickles(rank, url):
    options = rpc.TensorPipeRpcBackendOptions(init_method=url, pickle="on" if rank == 0 else "off")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    texts = []
    if rank == 0:
        for function, args in ((echo, (Evil(),)), (lambda: made.append(1), ())):
            with pytest.raises(NotAllowedError, match="worker1 reads no pickles") as error:
                rpc.rpc_sync("worker1", function, args=args)
            texts.append(str(error.value))
        assert rpc.rpc_sync("worker1", count_made) == 0
    else:
        with pytest.raises(NotAllowedError, match=r"worker0 reads pickles, but was sent an object") as error:
            rpc.rpc_sync("worker0", echo, args=(SAMPLE,))
    rpc.shutdown()
    return texts


def test_a_worker_reads_pickles_or_objects_without_them_and_not_both():
    text, _ = run_ranks(one_pickles, 2, f"tcp://127.0.0.1:{free_port()}", init=False)
    assert "start all workers of the group with it" in text[0]


def read_pickled_exceptions(rank):
    with workers(1, pickle="off"):
        for detail in (pickle.dumps(Evil()), b"Nposix\0system", b"Nbuiltins\0exec"):
            assert type(exceptions._rebuild_exception("text", detail, "worker1")) is rpc.RemoteException
    assert made == []


def test_a_pickled_exception_is_not_read():
    run_ranks(read_pickled_exceptions, 1, init=False)


def send_values_to_a_worker_with_a_list(rank):
    with workers(1, pickle="off", allowed_functions=[echo, Unregistered]):
        assert rpc.rpc_sync("worker0", echo, args=(Unregistered(3),)) == Unregistered(3)
        assert rpc.rpc_sync("worker0", echo, args=(Pair(1, Unregistered),)) == Pair(1, Unregistered)
        for value in (count_made, pickle.loads):
            with pytest.raises(NotAllowedError):
                rpc.rpc_sync("worker0", echo, args=({value},))


def test_with_a_list_only_listed_and_registered_names_are_values():
    run_ranks(send_values_to_a_worker_with_a_list, 1, init=False)


def test_only_classes_are_registered():
    with pytest.raises(TypeError, match="register_data_class takes a class"):
        rpc.register_data_class(echo)
    with pytest.raises(TypeError, match="register_data_class takes a class"):
        rpc.register_data_class(type("<local>", (), {}))
    with pytest.raises(ValueError, match='must be "on" or "off"'):
        rpc.TensorPipeRpcBackendOptions(pickle="sometimes")
    assert "pickle='off'" in repr(rpc.TensorPipeRpcBackendOptions(pickle="off"))


@pytest.mark.parametrize(
    "value",
    [dict.fromkeys(key * (2**61 - 1) for key in range(2000)), {key * (2**61 - 1) for key in range(2000)}],
    ids=["dict", "set"],
)
def test_large_keys_whose_hashes_collide_are_refused(group, value):
    with pytest.raises(rpc.RpcError, match="the hashes of its keys collide too often"):
        rpc.rpc_sync("worker1", echo, args=(value,))


@rpc.register_data_class
class Guarded:
    def is_allowed(self):
        return False

    @property
    def token(self):
        return "secret"


@pytest.mark.parametrize(
    "name", ["is_allowed", "token", "__array_interface__", "__reduce_ex__", "__module__", "__class__"]
)
def test_an_object_has_no_fields_that_python_or_its_class_needs(group, name):
    value = Guarded()
    vars(value)[name] = True
    with pytest.raises(NotAllowedError, match=f"set the attribute {name} of a Guarded"):
        rpc.rpc_sync("worker1", echo, args=(value,))
