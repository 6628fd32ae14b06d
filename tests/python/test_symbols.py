"""None of our binaries uses torch's own RPC or distributed autograd."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

FORBIDDEN = re.compile(r"torch::distributed::(rpc|autograd)\b")


def forbidden_symbols(listing):
    """The lines of `nm -C` output that name what must not be used."""
    return [line for line in listing.splitlines() if FORBIDDEN.search(line)]


def undefined_symbols(binary):
    run = subprocess.run(["nm", "-DC", "--undefined-only", binary], capture_output=True, text=True, check=True)
    return run.stdout


def our_binaries():
    package = importlib.util.find_spec("torchrpc")
    if package is None or not package.submodule_search_locations:
        return []
    return sorted(Path(package.submodule_search_locations[0]).rglob("*.so"))


def test_no_symbol_of_torch_rpc_is_used():
    binaries = our_binaries()
    if not binaries:
        pytest.skip("torchrpc is not built: `make package` does it")
    assert shutil.which("nm"), "nm is missing; install binutils"
    for binary in binaries:
        symbols = undefined_symbols(binary)
        assert "c10::" in symbols, f"{binary} uses nothing of LibTorch: is this the right listing?"
        assert not forbidden_symbols(symbols), f"{binary} uses torch's own implementation"


def libuv_symbols(listing):
    """The lines of `nm -D` output that import or export libuv: LibTorch exports one of its own."""
    return [line for line in listing.splitlines() if re.search(r" uv_\w+$", line)]


def test_libuv_stays_inside():
    for binary in our_binaries():
        run = subprocess.run(["nm", "-D", binary], capture_output=True, text=True, check=True)
        assert not libuv_symbols(run.stdout), f"{binary} could be bound to LibTorch's libuv, or LibTorch to ours"


def libsodium_symbols(listing):
    """The lines of `nm -D` output that import or export libsodium: another copy may be in the process."""
    return [line for line in listing.splitlines() if re.search(r" (_?sodium_|_?crypto_|randombytes)\w*$", line)]


def test_libsodium_stays_inside():
    for binary in our_binaries():
        run = subprocess.run(["nm", "-D", binary], capture_output=True, text=True, check=True)
        assert not libsodium_symbols(run.stdout), f"{binary} could be bound to another libsodium"


def test_the_check_for_libsodium_can_fail():
    listing = "                 U sodium_memcmp\n0000000000001234 T crypto_auth_hmacsha256_init\n        U crypt\n"
    assert len(libsodium_symbols(listing)) == 2


def test_the_check_for_libuv_can_fail():
    assert libuv_symbols("                 U uv_run\n0000000000001234 T uv_close\n                 U uvw\n") == [
        "                 U uv_run",
        "0000000000001234 T uv_close",
    ]


def test_the_check_can_fail():
    listing = (
        "                 U c10::Error::what() const\n"
        "                 U torch::distributed::rpc::RpcAgent::getCurrentRpcAgent()\n"
        "                 U typeinfo for torch::distributed::autograd::DistAutogradContext\n"
    )
    assert len(forbidden_symbols(listing)) == 2
    assert forbidden_symbols("                 U torchrpc::distributed::rpc_thing()\n") == []
