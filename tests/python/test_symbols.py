"""The binaries use nothing of torch's own RPC or distributed autograd, and need no library that may be missing."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.lint

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
    return sorted(Path(package.submodule_search_locations[0]).rglob("*.so*"))


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
# libcrypto is no static library of ours: it is found at run time only (transport/native/auth/libcrypto.h).
INSIDE = {
    "libuv": r" uv_\w+$",
    "libsodium": r" (_?sodium_|_?crypto_|randombytes)\w*$",
    "libcrypto": r" (EVP|OPENSSL|ERR)_\w+$",
}


@pytest.mark.parametrize("library", INSIDE)
def test_symbols_of_a_static_library_are_not_exported(library):
    for binary in our_binaries():
        run = subprocess.run(["nm", "-D", binary], capture_output=True, text=True, check=True)
        assert not symbols_of(library, run.stdout), f"{binary} could be bound to another {library}, or that to ours"


# Static, or looked for at run time: a machine without them has to load ours all the same.
NOT_NEEDED = re.compile(r"lib(crypto|ssl|sodium|uv)\b")


def needed_libraries(listing):
    """Return the names of the libraries that `readelf -d` says are needed."""
    return re.findall(r"\(NEEDED\).*\[(.+)\]", listing)


def test_libraries_that_may_be_missing_are_not_needed():
    if not our_binaries():
        pytest.skip("torchrpc is not built: `make package` does it")
    for binary in our_binaries():
        run = subprocess.run(["readelf", "-d", binary], capture_output=True, text=True, check=True)
        needed = needed_libraries(run.stdout)
        assert needed, f"{binary} needs no library: is this the right listing?"
        assert not list(filter(NOT_NEEDED.match, needed)), f"{binary} cannot be loaded without {needed}"


def test_the_check_for_needed_libraries_can_fail():
    line = " 0x0000000000000001 (NEEDED)             Shared library: [{}]\n"
    listing = line.format("libcrypto.so.3") + line.format("libtorch_cpu.so")
    listing += " 0x000000000000001d (RUNPATH)            Library runpath: [/opt/libcrypto.so.3]\n"
    assert needed_libraries(listing) == ["libcrypto.so.3", "libtorch_cpu.so"]
    assert [bool(NOT_NEEDED.match(name)) for name in needed_libraries(listing)] == [True, False]


def test_the_check_for_libraries_can_fail():
    uv = ["                 U uv_run", "0000000000001234 T uv_close"]
    sodium = ["                 U sodium_memcmp", "0000000000001234 T crypto_auth_hmacsha256_init"]
    crypto = ["                 U EVP_CIPHER_CTX_new"]
    listing = "\n".join([*uv, "                 U uvw", *sodium, "        U crypt", *crypto])
    assert symbols_of("libuv", listing) == uv
    assert symbols_of("libsodium", listing) == sodium
    assert symbols_of("libcrypto", listing) == crypto


def test_the_check_can_fail():
    listing = (
        "                 U c10::Error::what() const\n"
        "                 U torch::distributed::rpc::RpcAgent::getCurrentRpcAgent()\n"
        "                 U typeinfo for torch::distributed::autograd::DistAutogradContext\n"
    )
    assert len(forbidden_symbols(listing)) == 2
    assert forbidden_symbols("                 U torchrpc::distributed::rpc_thing()\n") == []


def soname(binary):
    run = subprocess.run(["readelf", "-d", binary], capture_output=True, text=True, check=True)
    return re.search(r"\(SONAME\).*\[(.+)\]", run.stdout)[1]


def test_the_name_of_the_library_has_the_minor_version():
    libraries = [binary for binary in our_binaries() if binary.name.startswith("libtorchrpc.so.")]
    if not libraries:
        pytest.skip("torchrpc is not built: `make package` does it")
    root = Path(__file__).resolve().parents[2]
    version = re.search(r"^project\(torchrpc VERSION (\d+\.\d+)\.", (root / "CMakeLists.txt").read_text(), re.M)[1]
    for library in libraries:
        assert soname(library) == library.name == f"libtorchrpc.so.{version}"
