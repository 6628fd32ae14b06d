"""Values that scripts for torch send: what arrives is what arrives with torch's own RPC."""

import collections
import types

import numpy as np
import pytest
import torch

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


@pytest.mark.parametrize("zero_points", [torch.tensor([0, 3]), torch.tensor([0.5, 3.5])])
def test_a_tensor_quantized_per_channel_arrives(zero_points):
    dtype = torch.quint8 if zero_points.is_floating_point() else torch.qint8
    sent = torch.quantize_per_channel(torch.arange(4.0).view(2, 2), torch.tensor([0.1, 0.2]), zero_points, 0, dtype)
    arrived = rpc.rpc_sync("worker1", list, args=([sent],))[0]
    assert arrived.qscheme() == sent.qscheme() and arrived.dtype == sent.dtype
    assert torch.equal(arrived.dequantize(), sent.dequantize())
    assert torch.equal(arrived.q_per_channel_zero_points(), sent.q_per_channel_zero_points())


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


@pytest.mark.parametrize("args", ["ab", range(2), {"a": 1}, {1}, b"ab", collections.deque([1]), [1, 2]])
def test_args_may_be_any_iterable(args):
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


@pytest.mark.parametrize("args", [torch.ones(2), np.ones(2), 5])
def test_args_that_are_one_argument_are_an_error_that_says_how_to_write_it(args):
    with pytest.raises(TypeError, match=r"args must be a tuple or a list.*write args=\(x,\)"):
        rpc.rpc_sync("worker1", given, args=args)


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


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no MKL-DNN")
def test_an_opaque_tensor_is_refused_with_a_text():
    with pytest.raises(RuntimeError, match=r"cannot send a tensor of layout Mkldnn: call \.to_dense\(\) first"):
        rpc.rpc_sync("worker1", same, (torch.ones(2, 2).to_mkldnn(),))
    assert rpc.rpc_sync("worker1", same, (1,)) == 1


def numbers():
    yield 1


@pytest.mark.parametrize(
    "value", [numbers(), memoryview(b"ab"), {1: 2}.keys()], ids=["generator", "memoryview", "keys"]
)
def test_what_pickle_refuses_is_refused_with_its_text(value):
    with pytest.raises(TypeError, match=r"cannot pickle"):
        rpc.rpc_sync("worker1", same, (value,))
    assert rpc.rpc_sync("worker1", same, (1,)) == 1
