"""Workers that prove their names by TLS certificates."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from certificates import Authority, tls_environment
from outcomes import outcome_of
from waiting import eventually, remains

import torchrpc.rpc as rpc
from torchrpc.testing import free_port, run_ranks

pytestmark = pytest.mark.timeout(240)
NAMES = ("trainer-0", "trainer-1", "client-7")


def infer(value):
    return 2 * value


def train(value):
    return 3 * value


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path / "authority")


@pytest.fixture
def files(authority):
    """The TLS files of each worker of NAMES. The last is a client."""
    units = (None, None, "client")
    return [authority.sign(name, f"DNS:{name}", unit=unit) for name, unit in zip(NAMES, units, strict=True)]


def init(rank, url, files, world_size=2, names=NAMES, tls_names=None, **options):
    if files is not None:
        options["tls"] = rpc.TlsOptions(**files, names=tls_names)
    options = rpc.TensorPipeRpcBackendOptions(init_method=url, **options)
    rpc.init_rpc(names[rank], rank=rank, world_size=world_size, rpc_backend_options=options)


def debug_info():
    return rpc.api._get_current_rpc_agent().get_debug_info()


def use_tensors(rank, url, files, transport):
    init(rank, url, files[rank], transport=transport)
    results = []
    if rank == 0:
        for count in (1, 1000, 3_000_000):
            sent = torch.arange(count)
            results.append(torch.equal(rpc.rpc_sync(NAMES[1], infer, (sent,)), 2 * sent))
    info = debug_info()
    rpc.shutdown()
    return results, info["transport.tcp_encryption"], int(info["transport.encrypted_connections"]) > 0


@pytest.mark.parametrize("transport", ["native", "tcp"])
def test_workers_with_certificates_call_each_other(files, transport):
    (results, protection, is_encrypted), _ = run_ranks(
        use_tensors, 2, f"tcp://localhost:{free_port()}", files, transport, init=False
    )
    assert results == [True] * 3
    assert protection == "TLS 1.3"
    assert is_encrypted == (transport == "tcp")  # within a host, the certificate is proved, and memory is shared


def exchange_many(rank, url, files):
    """Both directions of one connection at once, by several threads."""
    init(rank, url, files[rank], transport="tcp")
    sent = [torch.full((50_000 * i,), i) for i in range(1, 9)]
    other = NAMES[1 - rank]
    results = []
    for _ in range(20):
        futures = [rpc.rpc_async(other, infer, (tensor,)) for tensor in sent]
        results += [torch.equal(future.wait(), 2 * tensor) for future, tensor in zip(futures, sent, strict=True)]
    rpc.shutdown()
    return all(results)


def test_both_directions_at_once(files):
    url = f"tcp://localhost:{free_port()}"
    assert run_ranks(exchange_many, 2, url, files, init=False) == [True, True]


def call_trainer(rank, url, files):
    init(
        rank,
        url,
        files[rank],
        world_size=3,
        transport="tcp",
        allowed_functions={"client-*": [infer], "trainer-*": None},
    )
    outcomes = []
    if rank != 0:
        outcomes = [str(outcome_of(rpc.rpc_sync, NAMES[0], function, (torch.ones(2),))) for function in (infer, train)]
    rpc.shutdown()
    return outcomes


def test_what_a_worker_may_run_depends_on_its_certificate(files):
    _, trainer, client = run_ranks(call_trainer, 3, f"tcp://localhost:{free_port()}", files, init=False)
    assert trainer == ["tensor([2., 2.])", "tensor([3., 3.])"]
    assert client[0] == "tensor([2., 2.])"
    assert "NotAllowedError: trainer-0 does not let this caller run or send" in client[1]


def is_member(rank, url, files):
    """Return whether worker 1 is a member, as the other knows it when they have called each other."""
    init(rank, url, files[rank], transport="tcp")
    rpc.rpc_sync(NAMES[1 - rank], infer, args=(1,))
    result = rpc.api._get_current_rpc_agent()._is_member(1)
    rpc.shutdown()
    return result


@pytest.mark.parametrize(
    ("names", "unit"),
    [
        (["DNS:trainer-1", "URI:spiffe://example.org/client/web-3"], None),
        (["DNS:trainer-1", "URI:SPIFFE://example.org/Client/web-3"], None),
        (["DNS:trainer-1"], "Client"),
        (["DNS:trainer-1", "URI:spiffe://example.org/client/web-3"], "member"),
        (["DNS:trainer-1", "URI:spiffe://example.org/ns/prod/sa/trainer"], "Member"),
    ],
)
def test_of_the_roles_in_a_certificate_the_narrower_one_counts(authority, files, names, unit):
    files[1] = authority.sign("narrow", *names, unit=unit)
    results = run_ranks(is_member, 2, f"tcp://localhost:{free_port()}", files, init=False)
    assert results == [unit == "Member"] * 2


def test_a_certificate_with_a_unit_that_is_not_a_role_is_refused(authority):
    with pytest.raises(RuntimeError, match=r"organizational unit \(OU\) clients, which is not a role"):
        init(0, f"tcp://localhost:{free_port()}", authority.sign("misspelt", "DNS:trainer-0", unit="clients"))


def meet(rank, url, files, options, folder):
    """Start, call the other, and return how that ended."""
    os.environ["TORCHRPC_INIT_TIMEOUT"] = "12"  # worker 1 may wait so long, twice, if worker 0 is refused at once
    other = NAMES[1 - rank]
    try:
        init(rank, url, files[rank], transport="tcp", liveness_timeout=2, **options[rank])
        text = str(outcome_of(rpc.rpc_sync, other, infer, (1,))) if rank == 0 else ""
    except Exception as exc:
        text = f"{type(exc).__name__}: {exc}"
    has_called = Path(folder, "has_called")
    if rank == 0:
        has_called.touch()
    eventually(has_called.exists)
    with contextlib.suppress(rpc.ShutdownError):
        rpc.shutdown(graceful=False)
    return text


def caller_of(files, *options):
    """Return what worker 0, with the first files, gets from a call of worker 1."""
    url = f"tcp://localhost:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(meet, 2, url, files, options or ({}, {}), folder, init=False, timeout=100)[0]


def test_an_expired_certificate_is_refused(authority, files):
    expired = authority.sign("expired", "DNS:trainer-1", expired=True)
    assert "its TLS certificate is not valid: certificate has expired" in caller_of([files[0], expired])
    expired = authority.sign("expired", "DNS:trainer-0", expired=True)
    assert "it refused TLS with this worker" in caller_of([expired, files[1]])


def test_a_foreign_certificate_is_refused(tmp_path, files):
    foreign = Authority(tmp_path / "foreign").sign("trainer-1", "DNS:trainer-1") | {"ca": files[0]["ca"]}
    assert "its TLS certificate is not valid: unable to get local issuer certificate" in caller_of([files[0], foreign])


def test_a_revoked_certificate_is_refused(authority, files):
    assert caller_of(files) == "2"
    revoked = authority.revoke(files[1]["certificate"])
    assert "its TLS certificate is not valid: certificate revoked" in caller_of([files[0] | {"ca": revoked}, files[1]])


def test_one_workers_certificate_is_no_other_workers(files):
    """Worker 1 has the certificate of a client, and passes the check of its own by another rule for names."""
    text = caller_of([files[0], files[2]], {}, {"tls_names": "client-7"})
    assert (
        "the TLS certificate of the worker that calls itself trainer-1 is for client-7, and not for trainer-1" in text
    )


@pytest.mark.parametrize("without", [0, 1])
def test_a_worker_without_a_certificate_is_refused(files, without):
    text = caller_of([None if rank == without else files[rank] for rank in range(2)])
    assert "only one of the two workers uses TLS: give all workers of the group a TLS certificate" in text


def test_spiffe_ids_name_workers(authority):
    files = [authority.sign(f"spiffe-{rank}", "URI:spiffe://example.org/ns/prod/sa/trainer") for rank in range(2)]
    rule = {"tls_names": ["spiffe://example.org/ns/prod/sa/{base}", "spiffe://example.org/client/{name}"]}
    assert caller_of(files, rule, rule) == "2"
    other = {"tls_names": "spiffe://example.org/ns/test/sa/{base}"}
    assert "is for spiffe://example.org/ns/prod/sa/trainer, and not for" in caller_of(files, other, rule)


# ---- one worker, seen by another program ----


@pytest.fixture
def listener(files, monkeypatch):
    """A worker of a growing group that listens, with the second of the files, on the port that is returned."""
    monkeypatch.setenv("TORCHRPC_INIT_TIMEOUT", "10")
    port = free_port()
    url = f"tcp://localhost:{free_port()}"
    init(0, url, files[1], world_size=None, names=["trainer-1"], transport="tcp", port=port)
    yield port
    rpc.shutdown()


def s_client(port, *options, reads=True):
    """Connect with `openssl s_client`; return what it prints. `reads`: until the worker closes the connection."""
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", *map(str, options)]
    if reads:
        command.append("-ign_eof")
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60
    )
    return done.stdout.decode(errors="replace")


def client_options(files):
    return "-cert", files["certificate"], "-key", files["key"], "-CAfile", files["ca"]


def test_openssl_accepts_the_port(listener, files):
    text = s_client(listener, *client_options(files[0]), reads=False)
    assert "New, TLSv1.3, Cipher is TLS_" in text
    assert "Verify return code: 0 (ok)" in text
    assert "Acceptable client certificate CA names" not in text  # strangers learn no names


def test_openssl_without_a_valid_certificate_is_refused(listener, authority, files, tmp_path):
    assert "alert certificate required" in s_client(listener, "-CAfile", files[0]["ca"])
    expired = authority.sign("expired", "DNS:trainer-0", expired=True)
    assert "alert certificate expired" in s_client(listener, *client_options(expired))
    foreign = Authority(tmp_path / "foreign").sign("trainer-0", "DNS:trainer-0")
    assert "alert unknown ca" in s_client(listener, *client_options(foreign))
    assert "alert protocol version" in s_client(listener, "-tls1_2", *client_options(files[0]))


def test_renewed_files_are_used_without_a_restart(listener, authority, files):
    def shown():
        certificate = s_client(listener, *client_options(files[0]), reads=False)
        text = subprocess.run(
            ["openssl", "x509", "-noout", "-ext", "subjectAltName"], input=certificate, capture_output=True, text=True
        )
        return text.stdout.split("\n")[1].strip()

    assert shown() == "DNS:trainer-1"
    renewed = authority.sign("renewed", "DNS:trainer-1", "DNS:renewed")
    # Between the two the files do not fit together, and the worker keeps what it has.
    shutil.copy(renewed["key"], files[1]["key"])
    remains(lambda: shown() == "DNS:trainer-1", 2.5)
    shutil.copy(renewed["certificate"], files[1]["certificate"])
    eventually(lambda: shown() == "DNS:trainer-1, DNS:renewed")


def test_bytes_that_are_no_tls_end_their_connection_alone(listener, files):
    for first in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"x" * 70_000, b"\x00" * 32):
        with socket.create_connection(("127.0.0.1", listener)) as peer:
            peer.settimeout(20)
            try:
                peer.sendall(first)
                while peer.recv(4096):
                    pass
            except ConnectionError:
                pass
    test_openssl_accepts_the_port(listener, files)


# ---- the options ----


def start_alone(tmp_path, monkeypatch, **options):
    monkeypatch.setenv("TORCHRPC_INIT_TIMEOUT", "10")
    init(0, f"file://{tmp_path}/store", None, world_size=1, **options)
    try:
        return debug_info()
    finally:
        rpc.shutdown()


def test_the_environment_gives_the_files(tmp_path, monkeypatch, files):
    for name, value in tls_environment(files[0]).items():
        monkeypatch.setenv(name, value)
    assert start_alone(tmp_path, monkeypatch)["transport.tcp_encryption"] == "TLS 1.3"


@pytest.mark.parametrize(
    ("changed", "options", "words"),
    [
        ({"key": None}, {}, "give TORCHRPC_TLS_KEY, or key in the option tls, too"),
        ({"certificate": "nowhere.pem"}, {}, "the TLS certificate nowhere.pem cannot be read: No such file"),
        ({"ca": "/dev/null"}, {}, "the TLS authorities .ca. /dev/null cannot be read: it is no plain file"),
        ({"key": "other"}, {}, "the TLS key .* cannot be used: key values mismatch"),
        ({"certificate": "other"}, {}, "is for client-7, and not for trainer-0, as that of worker trainer-0 must be"),
        ({}, {"encryption": "off"}, "encryption is 'off', but a TLS certificate was given"),
        ({}, {"transport": "tensorpipe"}, "TensorPipe has no TLS: use the native transport"),
    ],
)
def test_wrong_options_are_errors_of_the_start(tmp_path, monkeypatch, files, changed, options, words):
    given = dict(files[0])
    for name, value in changed.items():
        given[name] = files[2][name] if value == "other" else value
        if value == "other" and name == "certificate":
            given["key"] = files[2]["key"]
    with pytest.raises((RuntimeError, ValueError), match=words):
        start_alone(tmp_path, monkeypatch, tls=rpc.TlsOptions(**given), **options)


def test_a_key_with_a_passphrase_is_refused(tmp_path, monkeypatch, files):
    key = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "pkey", "-aes256", "-passout", "pass:secret", "-in", files[0]["key"], "-out", key], check=True
    )
    with pytest.raises((RuntimeError, ValueError), match=r"the TLS key .* cannot be used"):
        start_alone(tmp_path, monkeypatch, tls=rpc.TlsOptions(**(files[0] | {"key": key})))


def test_options_of_the_wrong_type_are_refused():
    with pytest.raises(TypeError, match=r"tls must be rpc\.TlsOptions, but is a str"):
        rpc.TensorPipeRpcBackendOptions(tls="cert.pem")
    with pytest.raises(TypeError, match="key must be a path, but is a int"):
        rpc.TlsOptions(key=5)
    with pytest.raises(ValueError, match="'a b' in names is no DNS name or URI"):
        rpc.TlsOptions(names=["a b"])
    with pytest.raises(TypeError, match="names must be a str or a list of str, but has a int"):
        rpc.TlsOptions(names=[5])
