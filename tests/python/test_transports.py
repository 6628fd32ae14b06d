"""The transport that a group uses, and the errors of workers with different transports."""

import contextlib
import importlib.util
import multiprocessing
import os
import re
import socket
from pathlib import Path

import pytest
import torch

import torchrpc.rpc as rpc
from torchrpc import testing

TRANSPORTS = {
    "native": ({"transport": "native"}, "native(shm,tcp)"),
    "listed native": ({"_transports": ["native"]}, "native(shm,tcp)"),
    "listed shm": ({"_transports": ["shm", "uv"], "_channels": ["cma", "basic"]}, "native(shm,tcp)"),
    "listed uv": ({"_transports": ["uv"]}, "native(tcp)"),
    "listed ibv": ({"_transports": ["ibv", "uv"], "_channels": ["mpt_uv", "basic"]}, "native(tcp)"),
    "tensorpipe": ({"transport": "tensorpipe"}, "tensorpipe("),
    "tensorpipe over uv": ({"transport": "tensorpipe", "_transports": ["uv"]}, "tensorpipe(uv;"),
}


def transport_in_use():
    return rpc.api._get_current_rpc_agent().get_debug_info()["agent.transport"]


@pytest.mark.parametrize("options", TRANSPORTS)
def test_a_group_uses_the_transport_of_its_options(options):
    options, used = TRANSPORTS[options]
    with testing.workers(2, **options) as names:
        assert transport_in_use().startswith(used)
        large = torch.rand(1000, 1000)
        assert torch.equal(rpc.rpc_sync(names[1], torch.add, args=(large, 1)), large + 1)


def test_the_environment_chooses_where_options_do_not(monkeypatch):
    monkeypatch.setenv("TORCHRPC_TRANSPORT", "tensorpipe")
    with testing.workers(1):
        assert transport_in_use().startswith("tensorpipe")
    monkeypatch.delenv("TORCHRPC_TRANSPORT")
    with testing.workers(1):
        assert transport_in_use().startswith("native")


def without_ucx():
    """Return why no group can use UCX here, or an empty text."""
    try:
        rpc.TensorPipeRpcBackendOptions(transport="ucx")
    except RuntimeError as error:
        return str(error)
    return (
        "" if importlib.util.find_spec("libucx") else "the package libucx is not installed: pip install torchrpc[ucx]"
    )


@pytest.fixture
def ucx(monkeypatch):
    if reason := without_ucx():
        pytest.skip(reason)
    monkeypatch.setenv("TORCHRPC_TRANSPORT", "ucx")


def test_a_group_uses_ucx_of_the_python_package(ucx):
    package = Path(importlib.util.find_spec("libucx").origin).parent
    with testing.workers(1):
        assert transport_in_use().startswith("ucx(")
    with testing.workers(3, transport="ucx") as names:  # processes that started earlier do not see the variable
        version = (package / "UCX_WHEEL_VERSION.txt").read_text().strip()
        assert transport_in_use() == f"ucx({version})"
        large = torch.rand(1000, 1000)
        futures = [rpc.rpc_async(name, torch.add, args=(large, i)) for i, name in enumerate(names * 5)]
        assert all(torch.equal(future.wait(), large + i) for i, future in enumerate(futures))
        remote = rpc.remote(names[2], torch.ones, args=([3],))
        assert rpc.rpc_sync(names[1], torch.add, args=(remote.to_here(), 1)).tolist() == [2, 2, 2]


def test_ucx_is_refused_with_a_secret(ucx):
    options = rpc.TensorPipeRpcBackendOptions(secret="a secret of twenty-six bytes")
    with pytest.raises(RuntimeError, match="a secret was given, which UCX cannot prove"):
        rpc.TensorPipeAgent(torch.distributed.HashStore(), "alone", 0, 1, options, {}, [], init_timeout=10.0)


def test_tcp_can_be_used_within_a_host():
    with testing.workers(2, transport="tcp") as names:
        assert transport_in_use() == "native(tcp)"
        assert rpc.rpc_sync(names[1], torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]


def list_different_transports(rank):
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=os.environ["INIT_METHOD"], _transports=[["uv"], ["shm", "uv"]][rank]
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    result = rpc.rpc_sync(f"worker{1 - rank}", torch.ones, args=([1],)).item()
    rpc.shutdown()
    return result


def test_workers_with_different_lists_use_the_medium_that_both_list(tmp_path, monkeypatch):
    monkeypatch.setenv("INIT_METHOD", f"file://{tmp_path}/store")
    assert testing.run_ranks(list_different_transports, 2, init=False) == [1, 1]


def test_a_list_without_a_transport_that_exists_is_an_error():
    with pytest.raises(RuntimeError, match=r"Unknown transport: nosuch\. There are ibv, native, shm, uv"):
        rpc.TensorPipeRpcBackendOptions(_transports=["uv", "nosuch"])
    with pytest.raises(RuntimeError, match=r"Unknown channel: nosuch\. There are basic, "):
        rpc.TensorPipeRpcBackendOptions(_channels=["nosuch"])
    options = rpc.TensorPipeRpcBackendOptions(_transports=[])
    with pytest.raises(RuntimeError, match=r"_transports lists nothing: list 'shm' .* 'uv' for TCP"):
        rpc.TensorPipeAgent(torch.distributed.HashStore(), "alone", 0, 1, options, {}, [], init_timeout=10.0)


def test_unauthenticated_peers_are_counted_and_workers_are_not():
    with testing.workers(2) as names:
        rpc.rpc_sync(names[1], torch.ones, args=([1],))
        info = rpc.api._get_current_rpc_agent().get_debug_info()
        assert info["transport.refused_peers"] == "0"

    store = torch.distributed.HashStore()
    options = rpc.TensorPipeRpcBackendOptions(transport="native")
    agent = rpc.TensorPipeAgent(store, "alone", 0, 1, options, {}, [], init_timeout=10.0)
    agent.start()
    try:
        address = store.get("worker/0").decode(errors="replace")
        host, port = re.search(r"tcp=\[?([^;]*?)\]?:(\d+);", address).groups()
        with socket.create_connection((host, int(port)), timeout=60) as peer:
            peer.sendall(b"GET / HTTP/1.1\r\n")  # as long as the first handshake message
            assert peer.recv(1) == b""
        assert agent.get_debug_info()["transport.refused_peers"] == "1"
    finally:
        agent.shutdown()


def disagree(rank):
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=os.environ["INIT_METHOD"], transport=["native", "tensorpipe"][rank]
    )
    try:
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        rpc.rpc_sync(f"worker{1 - rank}", torch.ones, args=([1],))
    except Exception as error:
        return str(error)
    finally:
        with contextlib.suppress(rpc.RpcError):  # not initialized
            rpc.shutdown(graceful=False)


def test_different_transports_are_an_error_with_advice(tmp_path, monkeypatch):
    monkeypatch.setenv("INIT_METHOD", f"file://{tmp_path}/store")
    for text in testing.run_ranks(disagree, 2, init=False):
        assert text and "TORCHRPC_TRANSPORT" in text


KEPT = []


def keep(tensors):
    KEPT.extend(tensors)
    return tensors


def add_to_kept(number):
    for tensor in KEPT:
        tensor.add_(number)
    return [float(tensor[0]) + float(tensor[-1]) for tensor in KEPT]


def test_large_tensors_are_independent_copies_even_if_many_are_kept():
    # More than the shared memory has room for: some tensors go through the ring.
    with testing.workers(2) as names:
        rpc.rpc_sync(names[1], torch.ones, args=([1],))  # messages that wait for the connection go through the ring
        sent = [torch.full((1 << 20,), float(i)) for i in range(40)]
        received_tensors = rpc.rpc_sync(names[1], keep, args=(sent,))
        for tensor in sent:
            tensor.fill_(-1)
        assert rpc.rpc_sync(names[1], add_to_kept, args=(100,)) == [2.0 * (i + 100) for i in range(40)]
        assert all(bool((tensor == i).all()) for i, tensor in enumerate(received_tensors))
        for tensor in received_tensors:
            tensor.fill_(-2)
        assert rpc.rpc_sync(names[1], add_to_kept, args=(0,)) == [2.0 * (i + 100) for i in range(40)]


def sum_on_command(tensor, pipe):
    pipe.recv()
    pipe.send(float(tensor.sum()))
    tensor.fill_(9)
    pipe.send("changed")
    pipe.recv()


def test_a_forked_process_has_the_tensors_as_they_were():
    size = 1 << 20
    with testing.workers(2) as names:
        received = rpc.rpc_sync(names[1], torch.ones, args=([size],))
        context = multiprocessing.get_context("fork")
        parent_end, child_end = context.Pipe()
        child = context.Process(target=sum_on_command, args=(received, child_end))
        child.start()
        received.fill_(5)
        del received  # the next tensor could reuse its memory
        others = [rpc.rpc_sync(names[1], torch.zeros, args=([size],)) for _ in range(2)]
        parent_end.send("go")
        assert parent_end.recv() == size
        assert parent_end.recv() == "changed"
        assert not any(bool(tensor.any()) for tensor in others)
        parent_end.send("end")
        child.join(60)
        assert child.exitcode == 0
