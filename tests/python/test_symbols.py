"""The binaries use nothing of torch's own RPC or distributed autograd."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

FORBIDDEN = re.compile(r"torch::distributed::(rpc|autograd)\b")


def forbidden_symbols(listing):
    """Return the lines of `nm -C` output with symbols that must not be used."""
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


def symbols_of(library, listing):
    """Return the lines of `nm -D` output that import or export symbols of a statically linked library."""
    return [line for line in listing.splitlines() if re.search(INSIDE[library], line)]


# LibTorch exports a libuv of its own, and the process may have another libsodium: the copies must not be mixed.
INSIDE = {"libuv": r" uv_\w+$", "libsodium": r" (_?sodium_|_?crypto_|randombytes)\w*$"}


@pytest.mark.parametrize("library", INSIDE)
def test_symbols_of_a_static_library_are_not_exported(library):
    for binary in our_binaries():
        run = subprocess.run(["nm", "-D", binary], capture_output=True, text=True, check=True)
        assert not symbols_of(library, run.stdout), f"{binary} could be bound to another {library}, or that to ours"


def test_the_check_for_libraries_can_fail():
    uv = ["                 U uv_run", "0000000000001234 T uv_close"]
    sodium = ["                 U sodium_memcmp", "0000000000001234 T crypto_auth_hmacsha256_init"]
    listing = "\n".join([*uv, "                 U uvw", *sodium, "        U crypt"])
    assert symbols_of("libuv", listing) == uv
    assert symbols_of("libsodium", listing) == sodium


def test_the_check_can_fail():
    listing = (
        "                 U c10::Error::what() const\n"
        "                 U torch::distributed::rpc::RpcAgent::getCurrentRpcAgent()\n"
        "                 U typeinfo for torch::distributed::autograd::DistAutogradContext\n"
    )
    assert len(forbidden_symbols(listing)) == 2
    assert forbidden_symbols("                 U torchrpc::distributed::rpc_thing()\n") == []
