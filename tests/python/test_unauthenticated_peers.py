"""Unauthenticated peers, and the options against them: secrets, ports, addresses."""

import socket
import stat
import sys
from pathlib import Path

import pytest
import torch

import torchrpc.rpc as rpc
from torchrpc.testing import RankError, free_port, run_ranks, workers

sys.path.insert(0, str(Path(__file__).parents[1]))
from chaos_cases import unauthenticated_peers

SECRET = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize("case", [pytest.param(run, id=name) for name, run in unauthenticated_peers.CASES])
def test_unauthenticated_peers_are_rejected(case):
    assert case("torchrpc")


# --- Secrets ---


def form(tmp_path, *options, env=None):
    return run_ranks(add_and_wait, 2, f"file://{tmp_path}/store", options, init=False, env=env)


def add_and_wait(rank, url, options):
    backend_options = rpc.TensorPipeRpcBackendOptions(init_method=url, **options[rank])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=backend_options)
    value = rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(torch.ones(1), 1)).item()
    rpc.shutdown()
    return value


@pytest.mark.parametrize("secret", [SECRET, SECRET.encode()], ids=["str", "bytes"])
def test_workers_with_the_same_secret_form_a_group(tmp_path, secret):
    assert form(tmp_path, {"secret": SECRET}, {"secret": secret}) == [2.0, 2.0]


def test_a_secret_may_come_from_the_environment_or_a_file(tmp_path):
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)
    assert form(tmp_path, {}, {"secret": SECRET}, env={"TORCHRPC_SECRET": SECRET}) == [2.0, 2.0]
    env = {"TORCHRPC_SECRET_FILE": str(file), "TORCHRPC_SECRET": "the file comes before this one"}
    assert form(tmp_path, {}, {"secret": SECRET}, env=env) == [2.0, 2.0]


def test_different_secrets_are_refused_with_advice(tmp_path):
    with pytest.raises(RankError, match=r"secret of the group|does not know the secret[\s\S]*TORCHRPC_SECRET_FILE"):
        form(tmp_path, {"secret": SECRET}, {"secret": SECRET[::-1] + "x"})


@pytest.mark.parametrize("given", [0, 1])
def test_a_secret_on_some_workers_only_is_an_error_at_the_start(tmp_path, given):
    options = [{}, {}]
    options[given] = {"secret": SECRET}
    with pytest.raises(RankError, match=r"was given (a|no) secret, but others of its group were"):
        form(tmp_path, *options, env={"TORCHRPC_INIT_TIMEOUT": "10"})


@pytest.mark.parametrize(
    ("options", "env", "words"),
    [
        ({"secret": "short"}, {}, "option secret has 5 bytes"),
        ({}, {"TORCHRPC_SECRET": "short"}, "TORCHRPC_SECRET has 5 bytes"),
        ({}, {"TORCHRPC_SECRET_FILE": "/nowhere"}, "/nowhere, which cannot be read"),
        ({"secret": SECRET, "transport": "tensorpipe"}, {}, "TensorPipe cannot prove"),
    ],
)
def test_a_secret_that_cannot_be_used_is_refused(tmp_path, options, env, words):
    with pytest.raises(RankError, match=words):
        form(tmp_path, options, options, env={"TORCHRPC_INIT_TIMEOUT": "10", **env})


def test_a_secret_file_that_other_users_may_read_is_refused(tmp_path):
    file = tmp_path / "secret"
    file.write_text(SECRET)
    file.chmod(stat.S_IRUSR | stat.S_IRGRP)
    with pytest.raises(RankError, match=r"others than its owner may read.*chmod 600"):
        form(tmp_path, {}, {}, env={"TORCHRPC_SECRET_FILE": str(file), "TORCHRPC_INIT_TIMEOUT": "10"})


def test_a_secret_of_another_type_is_refused():
    with pytest.raises(TypeError, match="secret must be a str or bytes, but is a int"):
        rpc.TensorPipeRpcBackendOptions(secret=5)
    with pytest.raises(ValueError, match="secret is empty"):
        rpc.TensorPipeRpcBackendOptions(secret="")


# --- Ports and addresses ---


def listening_ports():
    return [port for _, port in unauthenticated_peers.listening()]


def test_the_port_can_be_chosen(tmp_path):
    mine, others = free_port(), free_port()
    with workers(2, port=f"{others}-{others + 1}"):
        assert rpc.rpc_sync("worker1", listening_ports) in ([others], [others + 1])
    assert form_on(tmp_path, str(mine)) == [mine]


def form_on(tmp_path, port):
    return run_ranks(alone, 1, f"file://{tmp_path}/alone", port, init=False)[0]


def alone(rank, url, port):
    options = rpc.TensorPipeRpcBackendOptions(init_method=url, port=port)
    rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
    ports = listening_ports()
    rpc.shutdown()
    return ports


def test_the_first_free_port_of_a_range_is_used(tmp_path):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        first = taken.getsockname()[1]
        assert form_on(tmp_path, f"{first}-{first + 20}")[0] in range(first + 1, first + 21)


def test_a_range_without_a_free_port_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RankError, match=f"cannot listen on .*:{port}: Address already in use"):
            form_on(tmp_path, str(port))


@pytest.mark.parametrize("port", ["http", "1-", "70000", "5-3", "0-9"])
def test_a_port_that_is_none_is_refused(tmp_path, port):
    with pytest.raises(RankError, match=f"the option port is '{port}': it can be a port"):
        form_on(tmp_path, port)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_group_listens_at_the_address_of_its_rendezvous(host):
    if host == "[::1]" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    url = f"tcp://{host}:{free_port()}"
    found = run_ranks(where, 2, url, init=False, env={"MASTER_ADDR": "203.0.113.1"})
    assert {address for rank in found for address in rank} <= {"127.0.0.1", "::1"}


def where(rank, url):
    rpc.init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=2,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=url),
    )
    addresses = [address for address, _ in unauthenticated_peers.listening()]
    rpc.shutdown()
    return addresses


def test_a_host_that_cannot_be_resolved_is_named():
    env = {"TORCHRPC_INIT_TIMEOUT": "3"}
    with pytest.raises(RankError, match=r"no\.such\.host\.invalid"):
        run_ranks(where, 1, f"tcp://no.such.host.invalid:{free_port()}", init=False, env=env)


def test_two_groups_of_one_process_share_a_store():
    port = free_port()
    assert run_ranks(twice, 1, f"tcp://127.0.0.1:{port}", init=False) == [[1.0, 1.0]]


def twice(rank, url):
    values = []
    for _ in range(2):
        rpc.init_rpc(
            "worker0", rank=0, world_size=1, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=url)
        )
        values.append(rpc.rpc_sync("worker0", torch.ones, args=([1],)).item())
        rpc.shutdown()
    return values
