#!/usr/bin/env python3
"""Builds the wheels: one for each Python, with binaries for each release of torch; tries each in a fresh environment.

The binaries are linked for glibc 2.28 and the libstdc++ of GCC 8, independently of the versions on this system: against
stub libraries of that glibc, which zig makes, and with tools/manylinux/older_libraries.cpp. auditwheel checks the
result, and gives the wheels their tag, manylinux_2_28. Two runs on the same system give the same bytes.
"""

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from torch_environments import PYTHONS, ROOT, SUPPORTED, environment, interpreter, run

BUILD = ROOT / "build/wheels"
GLIBC = "2.28"
LIBRARIES_OF_TORCH = ("libc10.so", "libtorch_cpu.so", "libtorch_python.so", "libtorch.so")


def linker_options() -> dict[str, str]:
    """Return CMake's options to link for the older system libraries; make these libraries first."""
    folder, source = BUILD / f"glibc-{GLIBC}", ROOT / "tools/manylinux/older_libraries.cpp"
    # The name of the shim contains a hash of its source, so that CMake links it again after a change.
    stubs, shim = folder / "stubs", folder / f"older_libraries-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}.o"
    stubs.mkdir(parents=True, exist_ok=True)
    if not (stubs / "libc_nonshared.a").exists():
        (folder / "empty.c").write_text("void nothing(void) {}\n")
        cache = {name: str(folder / "zig") for name in ("ZIG_LOCAL_CACHE_DIR", "ZIG_GLOBAL_CACHE_DIR")}
        target = f"{platform.machine()}-linux-gnu.{GLIBC}"
        zig = (sys.executable, "-m", "ziglang", "cc", "-target", target, "-shared", "-fPIC")
        run(*zig, folder / "empty.c", "-o", folder / "empty.so", env={**os.environ, **cache})
        for pattern in ("*.so.*", "libc_nonshared.a"):
            for library in (folder / "zig").glob(f"o/*/{pattern}"):
                shutil.copy2(library, stubs)
    run("c++", "-O2", "-fPIC", "-std=c++20", "-c", source, "-o", shim)
    names = ("libc.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libm.so.6", "libc_nonshared.a")
    libraries = [shim, "-lstdc++", *(stubs / name for name in names), "-lgcc_s", "-lgcc"]
    return {
        "CMAKE_SHARED_LINKER_FLAGS": "-nodefaultlibs",
        "CMAKE_MODULE_LINKER_FLAGS": "-nodefaultlibs",
        "CMAKE_CXX_STANDARD_LIBRARIES": " ".join(map(str, libraries)),
    }


def build_binaries(python: str, torch: str, env: Path, binaries: Path) -> None:
    """Build the extension and the core for this Python and this torch into the folder `binaries`."""
    build = BUILD / f"torch{torch}"
    build.mkdir(parents=True, exist_ok=True)
    # All Pythons build in one folder, with the headers of torch under one path, so that ccache compiles the core once.
    libtorch = build / "libtorch"
    libtorch.unlink(missing_ok=True)
    site_packages = next((env / "lib").glob("python*/site-packages"))
    libtorch.symlink_to(site_packages / "torch")
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_CXX_FLAGS": f"-ffile-prefix-map={ROOT}=. -ffile-prefix-map={libtorch}=torch",
        "LibTorch_DIR": libtorch,
        "Python_EXECUTABLE": env / "bin/python",
        "TORCHRPC_ALLOW_ANY_TORCH": "OFF" if torch in SUPPORTED else "ON",
        "TORCHRPC_BUILD_TESTS": "OFF",
        "TORCHRPC_PC_TORCH": "${prefix}/../../../torch",  # in site-packages, wherever that is
        **linker_options(),
    }
    cmake = build / "binaries"
    # If the old precompiled header were still there, ccache would take the new one for a different header.
    shutil.rmtree(cmake, ignore_errors=True)
    definitions = (f"-D{name}={value}" for name, value in options.items())
    run("cmake", "-S", ROOT, "-B", cmake, "-G", "Ninja", *definitions)
    run("cmake", "--build", cmake, "--target", "torchrpc_package")
    run("cmake", "--install", cmake, "--strip", "--component", "python", "--prefix", binaries)


def build_wheel(python: str, releases: Iterable[str], output: Path) -> Path | None:
    """Build and repair the wheel of this Python; return its path, or None if no torch has a wheel for it."""
    tag = "cp" + python.replace(".", "")
    package, raw = BUILD / tag / "package", BUILD / tag / "raw"
    for folder in (package, raw):
        shutil.rmtree(folder, ignore_errors=True)
    built = None
    for release in releases:
        if env := environment(python, release):
            build_binaries(python, release, env, package)
            built = env
    if built is None:
        return None
    commit_time = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True)
    variables = {
        **os.environ,
        "TORCHRPC_BINARIES": str(package / "_built"),
        "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH") or commit_time.stdout.strip() or "0",
    }
    run(
        *("uv", "build", "--wheel", "--no-build-isolation", "--python", built / "bin/python", "--out-dir", raw, ROOT),
        env=variables,
    )
    excluded = [word for library in LIBRARIES_OF_TORCH for word in ("--exclude", library)]
    repaired = BUILD / tag / "repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    tag_of_system = ("--plat", f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}")
    run("auditwheel", "repair", *excluded, *tag_of_system, "--wheel-dir", repaired, *raw.glob("*.whl"), env=variables)
    output.mkdir(parents=True, exist_ok=True)
    for old in output.glob(f"torchrpc-*-{tag}-*.whl"):
        old.unlink()
    return Path(shutil.copy2(next(repaired.glob("*.whl")), output))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="*", default=[], metavar="X.Y", help="default: all that this machine has")
    parser.add_argument("--torch", nargs="*", default=[], metavar="X.Y", help="default: all that are supported")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="default: dist")
    parser.add_argument("--no-check", action="store_true", help="do not try the wheels")
    arguments = parser.parse_args()
    failed = False
    for python in arguments.python or PYTHONS:
        if not interpreter(python):
            print(f"Python {python}: not on this machine", flush=True)
            failed |= python in arguments.python
            continue
        wheel = build_wheel(python, arguments.torch or SUPPORTED, arguments.output)
        if wheel is None:
            print(f"Python {python}: no release of torch has a wheel for it", flush=True)
            continue
        print(f"Python {python}: {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
        if not arguments.no_check:
            failed |= run(ROOT / "tools/check_wheel.sh", wheel, interpreter(python), check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
