"""Values that scripts for torch send: what arrives is what arrives with torch's own RPC."""

import collections
import re
import types

import numpy as np
import pytest
import torch

import torchrpc
import torchrpc.autograd as dist_autograd
import torchrpc.rpc as rpc
from torchrpc.testing import workers


@pytest.fixture(scope="module", autouse=True)
def group():
    with workers(2):
        yield


def fill_first(*tensors):
    tensors[0].fill_(7)
    return [tensor.tolist() for tensor in tensors]


def fill_first_of(container):
    return fill_first(*container["tensors"])


@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_views_of_one_storage_arrive_as_such(to):
    base = torch.zeros(4)
    views = (base, base[1:3], base.view(2, 2), base[:0], torch.ones(1))
    expected = [[7.0] * 4, [7.0] * 2, [[7.0] * 2] * 2, [], [1.0]]
    assert rpc.rpc_sync(to, fill_first, args=views) == expected
    assert rpc.rpc_sync(to, fill_first_of, args=({"tensors": views},)) == expected
    # By pickle.
    assert rpc.rpc_sync(to, fill_first_of, args=(collections.OrderedDict(tensors=views),)) == expected
    assert base.tolist() == [0] * 4


def ones_and_view():
    ones = torch.ones(6)
    return ones, ones[2:4]


def test_views_of_one_storage_are_results():
    for result in (rpc.rpc_sync("worker1", ones_and_view), rpc.remote("worker1", ones_and_view).to_here()):
        whole, part = result
        whole.fill_(9)
        assert part.tolist() == [9, 9]


def kind_of(value):
    return type(value), getattr(value, "requires_grad", None), getattr(value, "is_leaf", None)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_arrives_as_a_parameter(requires_grad):
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad)
    assert rpc.rpc_sync("worker1", kind_of, args=(parameter,)) == (torch.nn.Parameter, requires_grad, True)
    (arrived,) = rpc.rpc_sync("worker1", list, args=([parameter],))
    assert kind_of(arrived) == (torch.nn.Parameter, requires_grad, True)


def double(x):
    return x * 2


def test_gradients_of_a_parameter_in_a_call_return_to_it():
    parameter = torch.nn.Parameter(torch.ones(2))
    remote = rpc.remote("worker1", torch.nn.Parameter, args=(torch.ones(2),))
    with dist_autograd.context() as context:
        fetched = remote.to_here()
        assert type(fetched) is torch.nn.Parameter
        loss = rpc.rpc_sync("worker1", double, args=(parameter,)).sum() + fetched.sum()
        dist_autograd.backward(context, [loss])
        assert dist_autograd.get_gradients(context)[parameter].tolist() == [2, 2]


def test_attributes_of_a_parameter_arrive():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.note = "kept"
    arrived = rpc.rpc_sync("worker1", list, args=([parameter],))[0]
    assert type(arrived) is torch.nn.Parameter and arrived.note == "kept"


def write_to(array):
    array[0] = 5
    return array


@pytest.mark.parametrize("size", [3, 3000])
def test_a_read_only_array_arrives_writable(size):
    array = np.arange(size)
    array.flags.writeable = False
    assert rpc.rpc_sync("worker1", write_to, args=(array,))[0] == 5
    assert rpc.rpc_sync("worker1", write_to, args=(np.broadcast_to(np.arange(1), size).copy(),))[0] == 5


@pytest.mark.parametrize(
    ("zero_points", "function"),
    [
        pytest.param(torch.tensor([0, 3]), lambda tensor: tensor, id="integers"),
        pytest.param(torch.tensor([0.5, 3.5]), lambda tensor: tensor, id="floats"),
        pytest.param(torch.tensor([0, 3]), torch.clone, id="operator"),
    ],
)
def test_a_tensor_quantized_per_channel_arrives(zero_points, function):
    dtype = torch.quint8 if zero_points.is_floating_point() else torch.qint8
    sent = torch.quantize_per_channel(torch.arange(4.0).view(2, 2), torch.tensor([0.1, 0.2]), zero_points, 0, dtype)
    arrived = rpc.rpc_sync("worker1", function, args=(sent,))
    assert arrived.qscheme() == sent.qscheme() and arrived.dtype == sent.dtype
    assert torch.equal(arrived.dequantize(), sent.dequantize())
    assert torch.equal(arrived.q_per_channel_zero_points(), sent.q_per_channel_zero_points())


PACKED = [
    torch.quantize_per_tensor(torch.rand(2, 4), 0.1, 3, torch.quint4x2),
    torch.quantize_per_tensor(torch.rand(3, 5), 0.1, 3, torch.quint4x2),
    torch.quantize_per_tensor(torch.rand(5), 0.1, 3, torch.quint2x4),
    torch.quantize_per_channel(torch.rand(2, 4), torch.tensor([0.1, 0.2]), torch.tensor([0.5, 0]), 0, torch.quint4x2),
    torch._empty_affine_quantized([0, 3], scale=0.5, zero_point=2, dtype=torch.quint4x2),
]


@pytest.mark.parametrize("sent", PACKED, ids=lambda sent: f"{sent.dtype} {tuple(sent.shape)} {sent.qscheme()}")
def test_a_quantized_tensor_with_several_elements_in_a_byte_arrives(sent):
    arrived = rpc.rpc_sync("worker1", same, args=(sent,))
    assert (arrived.dtype, arrived.shape, arrived.qscheme()) == (sent.dtype, sent.shape, sent.qscheme())
    assert bytes(arrived.untyped_storage()) == bytes(sent.untyped_storage())
    assert arrived.dequantize().equal(sent.dequantize())


def test_a_view_of_a_quantized_tensor_with_several_elements_in_a_byte_is_refused():
    with pytest.raises(Exception, match="quint4x2 cannot be sent"):
        rpc.rpc_sync("worker1", same, args=(PACKED[0].t(),))


def test_a_quantized_tensor_keeps_its_strides():
    for dtype in (torch.qint8, torch.quint8, torch.qint32):
        sent = torch.quantize_per_tensor(torch.rand(2, 4), 0.1, 3, dtype)
        for view in (sent, sent.t(), sent[1:]):
            arrived = rpc.rpc_sync("worker1", same, args=(view,))
            assert (arrived.dtype, arrived.stride()) == (dtype, view.stride())
            assert torch.equal(arrived.dequantize(), view.dequantize())


def place(tensor):
    return tensor.storage_offset(), tensor.stride(), tensor.untyped_storage().nbytes()


SMALL, LARGE = torch.arange(12.0), torch.arange(100_000.0)
VIEWS_IN_PLACE = {
    "the end": SMALL[6:],
    "one element": SMALL[5],
    "a column": SMALL.view(3, 4)[:, 1:],
    "every third": SMALL[1::3],
    "transposed": SMALL.view(3, 4)[1:].t(),
    "of integers": torch.arange(12)[4:],
    "of bytes, not aligned": torch.arange(12, dtype=torch.uint8)[3:],
    "most of a large one": LARGE[1:],
    "of a parameter": torch.nn.Parameter(torch.ones(6))[3:].detach(),
    "without its base": torch.arange(9.0)[3:].requires_grad_(),
}
VIEWS_ALONE = {"half of a large one": LARGE[50_000:], "one element of a large one": LARGE[7]}


@pytest.mark.parametrize("name", VIEWS_IN_PLACE)
def test_a_view_keeps_its_offset_in_a_small_storage_and_in_one_that_it_uses_most_of(name):
    view = VIEWS_IN_PLACE[name]
    assert rpc.rpc_sync("worker1", place, args=(view,)) == place(view)
    arrived = rpc.rpc_sync("worker1", same, args=(view,))
    assert place(arrived) == place(view) and arrived.equal(view) and arrived.requires_grad == view.requires_grad


@pytest.mark.parametrize("name", VIEWS_ALONE)
def test_a_small_part_of_a_large_storage_is_sent_alone(name):
    view = VIEWS_ALONE[name]
    assert rpc.rpc_sync("worker1", place, args=(view,)) == (0, view.stride(), view.numel() * 4)
    assert rpc.rpc_sync("worker1", same, args=(view,)).equal(view)


def test_several_views_keep_their_offsets():
    views = [SMALL[6:8], SMALL[8:]]
    assert rpc.rpc_sync("worker1", places, args=(views,)) == places(views)


def places(tensors):
    return [place(tensor) for tensor in tensors]


def test_a_storage_arrives():
    storage = torch.arange(3.0).untyped_storage()
    arrived = rpc.rpc_sync("worker1", list, args=([storage],))[0]
    assert type(arrived) is torch.UntypedStorage and bytes(arrived) == bytes(storage)


def raise_text(text):
    raise ValueError(text)


@pytest.mark.parametrize("text", ["bad \ud800 text", "\udcff", "\0", "ünïcödé 🚀"])
def test_an_exception_with_any_text_keeps_type_worker_and_traceback(text):
    shown = text.encode("utf-8", "backslashreplace").decode()
    with pytest.raises(ValueError, match=r"On WorkerInfo.*worker1") as caught:
        rpc.rpc_sync("worker1", raise_text, args=(text,))
    assert "raise_text" in str(caught.value)
    assert shown in str(caught.value) or repr(text)[1:-1] in str(caught.value)


def given(*args, **kwargs):
    return args, kwargs


@pytest.mark.parametrize("args", [range(2), {}, {1}, {"a": 1}.values(), collections.deque([1]), [1, 2], []])
def test_args_may_be_any_sequence_set_or_iterator(args):
    for call in (
        rpc.rpc_sync,
        lambda *a, **k: rpc.rpc_async(*a, **k).wait(),
        lambda *a, **k: rpc.remote(*a, **k).to_here(),
    ):
        assert call("worker1", given, args=args) == (tuple(args), {})
    assert rpc.rpc_sync("worker1", given, args=(i for i in range(3))) == ((0, 1, 2), {})


@pytest.mark.parametrize(
    "kwargs", [types.MappingProxyType({"x": 1}), collections.UserDict(x=1), collections.OrderedDict(x=1)]
)
def test_kwargs_may_be_any_mapping(kwargs):
    assert rpc.rpc_sync("worker1", given, kwargs=kwargs) == ((), {"x": 1})


def named_by_remote_module(_, function, args=None, kwargs=None):
    return torchrpc.nn.RemoteModule("worker1", function, args, kwargs)


def supervised(to, function, args=None, kwargs=None):
    return torchrpc.supervise(function, [to], args, kwargs)


def with_a_key(to, function, args=None, kwargs=None):
    return rpc.rpc_sync(to, function, args, kwargs, idempotency_key="wrong arguments")


@torchrpc.batched
def given_in_batches(numbers):
    return numbers


CALLS = [rpc.rpc_sync, rpc.rpc_async, rpc.remote, with_a_key, supervised, named_by_remote_module]


@pytest.mark.parametrize("function", [given, torch.add, given_in_batches, torchrpc.cpp_function("nobody has it")])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_one_argument_without_its_tuple_is_an_error_that_says_how_to_write_it(call, function):
    for args, written in [
        ("abc", "args=('abc',)"),
        (b"abc", "args=(b'abc',)"),
        ("", "args=('',)"),
        (bytearray(b"a"), "args=(bytearray(b'a'),)"),
        (5, "args=(5,)"),
        (0, "args=(0,)"),
        (2.5, "args=(2.5,)"),
        (True, "args=(True,)"),
        (torch.ones(2), "args=(x,)"),
        (torch.tensor(1), "args=(x,)"),
        (np.ones(2), "args=(x,)"),
        ({"x": 1}, "args=(x,)"),
        (torch.nn.Sequential(), "args=(x,)"),
        (collections.Counter, "args=(x,)"),
    ]:
        with pytest.raises(TypeError, match=rf"args must be a tuple or a list.*write {re.escape(written)}\."):
            call("worker1", function, args)
    for kwargs in ([1], [], "abc", 5, [("x", 1)]):
        with pytest.raises(TypeError, match=r'kwargs must be a dict.*Write kwargs=\{"name": x\}\.'):
            call("worker1", function, (), kwargs)


def test_a_long_text_in_place_of_arguments_is_shortened():
    with pytest.raises(TypeError, match=r"args=\('a+\.\.\.a+',\)") as caught:
        rpc.rpc_sync("worker1", given, "a" * 100_000)
    assert len(str(caught.value)) < 300


def same(value):
    return value


def layouts():
    """Tensors of which most end the caller's process with torch's own RPC."""
    plain = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    made = [plain.to_sparse(), plain.to_sparse_csr(), plain.to_sparse_csc()]
    made += [plain.to_sparse_bsr((1, 1)), plain.to_sparse_bsc((1, 1)), torch.zeros(2, 4).to_sparse_bsc((1, 1))]
    made += [torch.quantize_per_tensor(torch.zeros(1, 0, 3), 0.1, 10, torch.quint8)]
    return [pytest.param(each, id=f"{str(each.layout)[6:]}-{each.numel()}") for each in made]


@pytest.mark.parametrize("tensor", layouts())
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"key": [x, object]}], ids=["plain", "pickled"])
def test_tensors_of_every_layout_arrive(tensor, wrap):
    arrived = rpc.rpc_sync("worker1", same, (wrap(tensor),))
    arrived = arrived["key"][0] if isinstance(arrived, dict) else arrived
    assert (arrived.layout, arrived.shape, arrived.dtype) == (tensor.layout, tensor.shape, tensor.dtype)
    dense = [each.dequantize() if each.is_quantized else each.to_dense() for each in (arrived, tensor)]
    assert torch.equal(*dense)


def opaque():
    return torch.ones(2, 2).to_mkldnn()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no MKL-DNN")
@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_an_opaque_tensor_is_refused_with_a_text(to):
    for function, args in ((same, (torch.ones(2, 2).to_mkldnn(),)), (opaque, ())):
        with pytest.raises(RuntimeError, match=r"cannot send a tensor of layout Mkldnn: call \.to_dense\(\) first"):
            rpc.rpc_sync(to, function, args)
        if args or to != "worker0":  # a value of this worker needs no message
            with pytest.raises(RuntimeError, match=r"cannot send a tensor of layout Mkldnn: call \.to_dense\(\)"):
                rpc.remote(to, function, args).to_here()
    assert rpc.rpc_sync(to, same, (1,)) == 1


def opaque_among_others():
    return {"a": torch.ones(3), "b": opaque()}


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no MKL-DNN")
@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_the_error_for_a_tensor_says_which_one_and_between_which_workers(to):
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.int8), opaque()]
    with pytest.raises(RuntimeError) as raised:
        rpc.rpc_sync(to, same, (tensors,))
    assert re.search(
        rf"worker0 cannot send a call to {to}: cannot send a tensor of layout Mkldnn: .*"
        r"It is tensor 3 of the 3 tensors of the message.* the shape \[2, 2\] and the dtype Float",
        str(raised.value),
    )
    with pytest.raises(RuntimeError) as raised:
        rpc.rpc_sync(to, opaque_among_others)
    receiver = "itself" if to == "worker0" else "worker0"
    assert f"{to} cannot send the result to {receiver}: cannot send a tensor of layout Mkldnn" in str(raised.value)
    assert "It is tensor 2 of the 2" in str(raised.value)


def numbers():
    yield 1


@pytest.mark.parametrize(
    "value", [numbers(), memoryview(b"ab"), {1: 2}.keys()], ids=["generator", "memoryview", "keys"]
)
def test_what_pickle_refuses_is_refused_with_its_text(value):
    with pytest.raises(TypeError, match=r"cannot pickle"):
        rpc.rpc_sync("worker1", same, (value,))
    assert rpc.rpc_sync("worker1", same, (1,)) == 1


def length(value):
    return len(value)


@pytest.mark.parametrize(
    "keys",
    [
        [complex(-1000003.0 * number, number) for number in range(2000)],
        [(complex(-1000003.0 * number, number), 1) for number in range(2000)],
    ],
    ids=["numbers", "tuples"],
)
def test_keys_whose_hashes_collide_are_refused(keys):
    """A larger dict of this kind would take the callee, and all of its other callers, seconds to hours."""
    with pytest.raises(rpc.RpcError, match="the hashes of its keys collide too often"):
        rpc.rpc_sync("worker1", length, args=(dict.fromkeys(keys),))
    assert rpc.rpc_sync("worker1", length, args=(dict.fromkeys(range(0, 1 << 50, 1 << 36)),)) == 1 << 14
