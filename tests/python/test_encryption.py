"""Workers whose connections pass through a proxy that records, changes, repeats, cuts or diverts the bytes."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from certificates import Authority, tls_environment

import torchrpc.rpc as rpc
from torchrpc.testing import free_port

SECRET = "0123456789abcdef0123456789abcdef"
MARKER = b"a marker that only the two workers may read"

# Leads connections to a worker's port to the proxy's, as a router between two hosts can.
REDIRECT = r"""
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

int connect(int fd, const struct sockaddr* address, socklen_t length) {
  int (*next)(int, const struct sockaddr*, socklen_t) = dlsym(RTLD_NEXT, "connect");
  struct sockaddr_in changed;
  if (address->sa_family == AF_INET && length >= sizeof(changed)) {
    memcpy(&changed, address, sizeof(changed));
    char name[32];
    snprintf(name, sizeof(name), "TEST_ROUTE_%d", ntohs(changed.sin_port));
    const char* proxy = getenv(name);
    if (proxy) {
      changed.sin_port = htons(atoi(proxy));
      return next(fd, (const struct sockaddr*)&changed, sizeof(changed));
    }
  }
  return next(fd, address, length);
}
"""

WORKER = f"""
import contextlib
import sys
import time
from pathlib import Path

import torch

import torchrpc.rpc as rpc

rank, world_size, url, port, encryption = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
MARKER = {MARKER!r}


def echo(text, tensor):
    return text, tensor


options = rpc.TensorPipeRpcBackendOptions(
    init_method=url, transport="tcp", port=port, secret={SECRET!r}, encryption=encryption, rpc_timeout=30
)
try:
    rpc.init_rpc(f"worker{{rank}}", rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        sent = torch.frombuffer(bytearray(MARKER * 20_000), dtype=torch.uint8)
        for _ in range(3):
            text, tensor = rpc.rpc_sync("worker1", echo, args=(MARKER.decode(), sent))
            print("the same" if text == MARKER.decode() and torch.equal(tensor, sent) else "changed unnoticed")
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
finally:
    # Worker 0 opens the connection, and the others end after it.
    done = Path(__file__).with_name("done")
    if rank == 0:
        done.touch()
    while not done.exists():
        time.sleep(0.01)  # this program does not have the tests' helpers
    with contextlib.suppress(Exception):
        rpc.shutdown(graceful=False)
"""


class Proxy:
    """Relays every connection to `target`. `attack(data, is_call, offset)` returns what to pass on of the data.

    `is_call`: they go from worker0 to worker1, and not back. The attack ends the connection by returning None.
    """

    def __init__(self, target, of_worker1, attack):
        self.target, self.of_worker1, self.attack = target, of_worker1, attack
        self.seen = bytearray()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                opener, _ = self.listener.accept()
                listener = socket.create_connection(("127.0.0.1", self.target))
                for source, to in ((opener, listener), (listener, opener)):
                    threading.Thread(
                        target=self.relay, args=(source, to, (to is listener) == self.of_worker1), daemon=True
                    ).start()

    def relay(self, source, to, is_call):
        offset = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                passed = self.attack(data, is_call, offset)
                if passed is None:
                    source.shutdown(socket.SHUT_RDWR)
                    break
                to.sendall(passed)
                offset += len(data)
        # What comes the other way still passes.
        with contextlib.suppress(OSError):
            to.shutdown(socket.SHUT_WR)


@pytest.fixture(scope="module")
def redirect(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("this test needs a C compiler and Linux's LD_PRELOAD")
    folder = tmp_path_factory.mktemp("redirect")
    (folder / "redirect.c").write_text(REDIRECT)
    library = folder / "redirect.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "redirect.c", "-ldl"], check=True)
    return library


def run_through(redirect, tmp_path, attack, encryption="auto", world_size=2, divert_to=None, settings=None):
    """All connections pass through proxies. Returns what the workers print, and the bytes that were seen.

    The encryption "tls": the workers have TLS certificates.
    """
    ports = [free_port() for _ in range(world_size)]
    proxies = [Proxy(port, rank == 1, attack) for rank, port in enumerate(ports)]
    routes = {f"TEST_ROUTE_{port}": str(proxy.port) for port, proxy in zip(ports, proxies, strict=True)}
    if divert_to is not None:
        routes[f"TEST_ROUTE_{ports[1]}"] = str(ports[divert_to])
    tls = {}
    if encryption == "tls":
        names = [f"DNS:worker{rank}" for rank in range(world_size)]
        tls, encryption = tls_environment(Authority(tmp_path / "authority").sign("workers", *names)), "on"
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    source = Path(rpc.__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")])),
        "TORCHRPC_INIT_TIMEOUT": "60",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "LD_PRELOAD": str(redirect),
        **routes,
        **tls,
    }
    processes = []
    for rank in range(world_size):
        setting = (settings or {}).get(rank, encryption)
        command = [sys.executable, script, rank, world_size, f"file://{tmp_path}/store", ports[rank], setting]
        processes.append(
            subprocess.Popen(
                list(map(str, command)),
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        printed = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
        for proxy in proxies:
            proxy.listener.close()
    return printed, b"".join(bytes(proxy.seen) for proxy in proxies)


def honest(data, is_call, offset):
    return data


def flip(in_call, position=200_000):
    """Changes one bit of the large tensor of a call, or of its result."""

    def attack(data, is_call, offset):
        index = position - offset
        if is_call != in_call or not 0 <= index < len(data):
            return data
        return data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]

    return attack


def repeat(data, is_call, offset):
    return data + data if is_call and offset > 200_000 else data


def cut(data, is_call, offset):
    return None if not is_call and offset > 200_000 else data


def swap():
    held = []

    def attack(data, is_call, offset):
        if not is_call or offset < 200_000:
            return data
        held.append(data)
        return b"" if len(held) % 2 else held[-1] + held[-2]

    return attack


@pytest.mark.parametrize("encryption", ["auto", "on", "tls", "off"])
def test_a_recording_proxy_reads_data_only_without_encryption(redirect, tmp_path, encryption):
    (caller, _), seen = run_through(redirect, tmp_path, honest, encryption)
    assert caller.splitlines() == ["the same"] * 3
    assert len(seen) > 2 * 3 * 20_000 * len(MARKER)
    assert (MARKER in seen) == (encryption == "off")
    assert (b"worker0" in seen) == (encryption == "off")
    assert SECRET.encode() not in seen


@pytest.mark.parametrize("in_call", [True, False], ids=["call", "result"])
def test_a_changed_bit_goes_unnoticed_without_encryption(redirect, tmp_path, in_call):
    (caller, _), _ = run_through(redirect, tmp_path, flip(in_call), "off")
    assert "changed unnoticed" in caller


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        pytest.param(lambda: flip(True), "bytes were changed, repeated or removed on the way", id="changed-call"),
        pytest.param(lambda: flip(False), "bytes were changed, repeated or removed on the way", id="changed-result"),
        pytest.param(lambda: repeat, "bytes were changed, repeated or removed on the way", id="repeated"),
        pytest.param(swap, "bytes were changed, repeated or removed on the way", id="reordered"),
        pytest.param(lambda: cut, "it has no authenticated end", id="cut"),
    ],
)
@pytest.mark.parametrize("encryption", ["on", "tls"])
def test_what_a_proxy_does_to_an_encrypted_connection_is_noticed(redirect, tmp_path, attack, words, encryption):
    (caller, _), _ = run_through(redirect, tmp_path, attack(), encryption)
    assert "changed unnoticed" not in caller
    assert words in caller and "worker1" in caller


@pytest.mark.parametrize("encryption", ["on", "tls", "off"])
def test_a_connection_that_is_diverted_to_another_worker_is_refused(redirect, tmp_path, encryption):
    (caller, *_), _ = run_through(redirect, tmp_path, honest, encryption, world_size=3, divert_to=2)
    assert "another worker than the one wanted listens here" in caller and "worker1" in caller


def test_two_settings_in_one_group_are_refused_by_both_with_both_names(redirect, tmp_path):
    (caller, callee), _ = run_through(redirect, tmp_path, honest, settings={0: "on", 1: "off"})
    for printed in (caller, callee):
        assert "worker0 encrypts its connections over TCP (encryption='on')" in printed
        assert "worker1 does not encrypt (encryption='off')" in printed
    assert "TORCHRPC_ENCRYPTION" in caller


# ---- the option ----


def test_another_setting_is_refused():
    with pytest.raises(ValueError, match="encryption is 'yes': it can be 'auto', 'on' or 'off'"):
        rpc.TensorPipeRpcBackendOptions(encryption="yes")
    assert rpc.TensorPipeRpcBackendOptions(encryption="on").encryption == "on"


def start_alone(tmp_path, monkeypatch, **options):
    monkeypatch.setenv("TORCHRPC_INIT_TIMEOUT", "10")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store", **options)
    rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
    try:
        return rpc.api._get_current_rpc_agent().get_debug_info()
    finally:
        rpc.shutdown()


def test_encryption_cannot_be_had_over_tensorpipe(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="TensorPipe does not encrypt: use the native transport"):
        start_alone(tmp_path, monkeypatch, transport="tensorpipe", encryption="on")


def test_the_environment_variable_is_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHRPC_ENCRYPTION", "maybe")
    with pytest.raises(RuntimeError, match="TORCHRPC_ENCRYPTION is 'maybe': it can be 'auto', 'on' or 'off'"):
        start_alone(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("options", "variable", "is_on"),
    [
        ({}, "", False),
        ({"secret": SECRET}, "", True),
        ({"secret": SECRET}, "off", False),
        ({}, "on", True),
        ({"encryption": "on"}, "off", True),
        ({"secret": SECRET, "encryption": "off"}, "on", False),
    ],
)
def test_debug_info_says_whether_connections_over_tcp_are_encrypted(tmp_path, monkeypatch, options, variable, is_on):
    monkeypatch.setenv("TORCHRPC_ENCRYPTION", variable)
    info = start_alone(tmp_path, monkeypatch, **options)
    assert (info["transport.tcp_encryption"] != "off") == is_on
    assert info["transport.encrypted_connections"] == "0"
