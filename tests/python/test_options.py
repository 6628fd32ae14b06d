"""The options of a worker and the registry of backends; no group is needed."""

import inspect
import re
import string
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import torchrpc.rpc as rpc
from torchrpc import _C
from torchrpc.rpc import backend_registry


def test_defaults_are_torchs():
    options = rpc.TensorPipeRpcBackendOptions()
    assert (options.num_worker_threads, options.rpc_timeout, options.init_method) == (16, 60.0, "env://")
    assert options.device_maps == {} and options.devices == []
    assert rpc.constants.DEFAULT_RPC_TIMEOUT_SEC == 60 and rpc.constants.DEFAULT_SHUTDOWN_TIMEOUT == 0


def test_options_can_be_changed():
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"], num_worker_threads=3)
    options.init_method += "x"
    options.rpc_timeout = 5
    assert (options.init_method, options.rpc_timeout, options.num_worker_threads) == ("env://x", 5.0, 3)
    assert options._transports == ["uv"] and isinstance(options, rpc.RpcBackendOptions)


def test_device_maps_add_up_in_any_spelling():
    options = rpc.TensorPipeRpcBackendOptions(device_maps={"a": {0: "cuda:1"}})
    options.set_device_map("a", {torch.device("cuda", 1): 0})
    options.set_device_map("b", {"cpu": "cpu"})
    cuda = [torch.device("cuda", i) for i in range(2)]
    assert options.device_maps == {
        "a": {cuda[0]: cuda[1], cuda[1]: cuda[0]},
        "b": {torch.device("cpu"): torch.device("cpu")},
    }
    options.set_devices([0, "cuda:1"])
    assert options.devices == cuda


def test_wrong_devices_are_refused():
    with pytest.raises(ValueError, match="`device_map` only supports 1-to-1 mapping"):
        rpc.TensorPipeRpcBackendOptions(device_maps={"a": {0: 0, 1: 0}})
    options = rpc.TensorPipeRpcBackendOptions(device_maps={"a": {0: 1}})
    with pytest.raises(
        ValueError, match="`set_device_map` only supports 1-to-1 mapping, trying to map cuda:0 to cuda:0"
    ):
        options.set_device_map("a", {0: 0})
    with pytest.raises(ValueError, match="`set_devices` expect a list of CUDA devices"):
        rpc.TensorPipeRpcBackendOptions(devices=["cpu"])
    with pytest.raises(RuntimeError, match="Device index must not be negative"):
        options.set_device_map("a", {-1: 0})


@pytest.mark.parametrize("bad", [{"rpc_timeout": timedelta(1)}, {"init_method": 5}, {"num_worker_threads": "many"}])
def test_options_of_the_wrong_type_are_refused(bad):
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        rpc.TensorPipeRpcBackendOptions(**bad)


def test_the_backend_has_a_repr_and_a_second_spelling():
    assert repr(rpc.BackendType.TENSORPIPE) == "BackendType.TENSORPIPE"
    assert rpc.Backend.TENSORPIPE is rpc.BackendType["TENSORPIPE"]
    assert backend_registry.backend_registered("TENSORPIPE") and not backend_registry.backend_registered("NOTHING")
    options = rpc.construct_rpc_backend_options(rpc.BackendType.TENSORPIPE, init_method="file:///x", rpc_timeout=3)
    assert isinstance(options, rpc.TensorPipeRpcBackendOptions) and options.init_method == "file:///x"


def test_backends_can_be_registered_without_making_old_members_useless(monkeypatch):
    monkeypatch.setattr(backend_registry, "BackendType", backend_registry.BackendType)
    before = rpc.BackendType.TENSORPIPE
    made = rpc.backend_registry.register_backend("STUB", lambda *a, **k: None, lambda **k: None)
    assert made is rpc.BackendType.STUB
    with pytest.raises(RuntimeError, match=r"^RPC backend STUB: already registered$"):
        rpc.backend_registry.register_backend("STUB", None, None)
    assert backend_registry.is_backend(before) and backend_registry.is_backend(made)


def test_profiling_keys_name_both_ends():
    from torchrpc.rpc.internal import RPCExecMode, _build_rpc_profiling_key

    assert _build_rpc_profiling_key(RPCExecMode.ASYNC, "foo", "a", "b") == "rpc_async#foo(a -> b)"


@pytest.mark.parametrize("name", ["abc*", " ", "a b"])
def test_names_that_are_none_are_refused(name):
    with pytest.raises(RuntimeError, match="Worker name must match"):
        rpc.WorkerInfo(name, 0)


def accepts(make, name):
    try:
        make(name)
    except RuntimeError:
        return False
    return True


def test_names_have_the_characters_that_the_documentation_lists():
    documented = re.search(r"letters, digits, ((?:`.`, )+)shorter than 128", inspect.getdoc(rpc.init_rpc))[1]
    characters = set(re.findall(r"`(.)`", documented)) | set(string.ascii_letters + string.digits)
    header = (Path(__file__).parents[2] / "include/torchrpc/node_options.h").read_text()
    assert f"letters, digits, {documented.removesuffix(', ')}. Empty" in header
    key = _C._make_group_key()
    for make in (lambda name: rpc.WorkerInfo(name, 0), lambda name: _C._make_identity(key, name, ["member"], 60)):
        assert {chr(code) for code in range(1, 256) if accepts(make, f"a{chr(code)}b")} == characters
        assert accepts(make, "x" * 127) and not accepts(make, "x" * 128)


def test_empty_and_long_names_are_refused():
    with pytest.raises(RuntimeError, match="must be non-empty"):
        rpc.WorkerInfo("", 0)
    with pytest.raises(RuntimeError, match="shorter than 128"):
        rpc.WorkerInfo("a" * 500, 0)


def test_worker_infos_compare_hash_print_and_pickle():
    import pickle

    info = rpc.WorkerInfo(name="worker0", id=0)
    assert repr(info) == "WorkerInfo(id=0, name=worker0)" and (info.name, info.id) == ("worker0", 0)
    assert info == rpc.WorkerInfo("worker0", 0) != rpc.WorkerInfo("worker0", 1)
    assert pickle.loads(pickle.dumps(info)) == info and len({info, rpc.WorkerInfo("worker0", 0)}) == 1


def test_the_limit_of_queued_bytes_is_a_positive_integer():
    assert rpc.TensorPipeRpcBackendOptions().max_queued_bytes is None
    assert rpc.TensorPipeRpcBackendOptions(max_queued_bytes=1 << 40).max_queued_bytes == 1 << 40
    for bad in (0, -1):
        with pytest.raises(RuntimeError, match=f"max_queued_bytes must be positive, but got {bad}"):
            rpc.TensorPipeRpcBackendOptions(max_queued_bytes=bad)
    for bad in ("1", 1.5):
        with pytest.raises(TypeError, match="incompatible constructor arguments"):
            rpc.TensorPipeRpcBackendOptions(max_queued_bytes=bad)


def test_the_window_of_keys_is_a_positive_number_of_seconds():
    assert rpc.TensorPipeRpcBackendOptions().idempotency_window is None
    assert rpc.TensorPipeRpcBackendOptions(idempotency_window=1.5).idempotency_window == 1.5
    for bad in (0, -1, float("nan")):
        with pytest.raises(RuntimeError, match="idempotency_window must be a positive number of seconds"):
            rpc.TensorPipeRpcBackendOptions(idempotency_window=bad)
    with pytest.raises(TypeError, match="idempotency_window must be a number of seconds"):
        rpc.TensorPipeRpcBackendOptions(idempotency_window="1")


def test_the_repr_of_options_has_what_differs_from_the_defaults():
    assert repr(rpc.TensorPipeRpcBackendOptions()) == "TensorPipeRpcBackendOptions()"
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=3, secret="x" * 16, transport="tcp", allowed_functions=["aten::add"]
    )
    assert repr(options) == (
        "TensorPipeRpcBackendOptions(num_worker_threads=3, transport='tcp', allowed_functions=['aten::add'])"
    )


def test_a_transport_that_does_not_exist_is_refused_when_the_options_are_made():
    with pytest.raises(RuntimeError, match=r"the option transport is 'shm': it can be 'auto', 'native'"):
        rpc.TensorPipeRpcBackendOptions(transport="shm")
