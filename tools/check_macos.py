#!/usr/bin/env python3
"""Which sources of the core compile for macOS on Apple silicon: a check of syntax and types by a cross compiler.

Nothing is linked, and nothing is run: see docs/macos.md. The compiler is zig's clang (`pip install ziglang`), which has
the headers of macOS's C library and of libc++. The headers of torch come from its wheel for macOS, which pip downloads
into build/macos (110 MiB); those of libuv and libsodium are the installed ones, which are the same on all systems.

Usage: tools/check_macos.py [REGEX]     (REGEX: only sources whose names match)
It prints a line for each source, with the first error of one that does not compile, and ends with 1 if there is any.
"""

import importlib.util
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build/macos"
TARGET = "aarch64-macos.14.0"
TORCH = "2.13.0"
SYSTEM_HEADERS = ("uv.h", "uv", "sodium.h", "sodium")
LAYERS = ("base", "wire", "transport", "agent", "profiling", "rref", "autograd", "optim", "node", "api")


def torch_headers() -> Path:
    """The include folder of torch's wheel for macOS."""
    include = CACHE / "torch/include"
    if not include.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        download += ["--platform", "macosx_14_0_arm64", "--python-version", "3.11", "--dest", str(CACHE)]
        subprocess.run([*download, f"torch=={TORCH}"], check=True)
        (wheel,) = CACHE.glob("torch-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(CACHE, [name for name in archive.namelist() if "/include/" in name])
        wheel.unlink()
    return include


def library_headers() -> Path:
    """A folder with the headers of libuv and libsodium, and none of Linux's."""
    include = CACHE / "libraries"
    include.mkdir(parents=True, exist_ok=True)
    for name in SYSTEM_HEADERS:
        link, header = include / name, Path("/usr/include") / name
        if not header.exists():
            raise SystemExit(f"{header} is missing: install the headers of libuv and libsodium")
        if not link.exists():
            link.symlink_to(header)
    return include


def first_error(errors: str) -> str:
    found = re.search(r"^(\S+?):(\d+):\d+: (?:fatal )?error: (.*)$", errors, re.M)
    if not found:
        return errors.strip().splitlines()[-1] if errors.strip() else "the compiler ended without a message"
    place = found[1].replace(f"{ROOT}/", "")
    return f"{place}:{found[2]}: {found[3]}"


def main() -> int:
    if importlib.util.find_spec("ziglang") is None:
        raise SystemExit(f"{sys.executable} has no ziglang: run pip install ziglang")
    wanted = re.compile(sys.argv[1] if len(sys.argv) > 1 else "")
    torch, libraries = torch_headers(), library_headers()
    command = [sys.executable, "-m", "ziglang", "c++", "-target", TARGET, "-std=c++20", "-O0", "-w", "-c"]
    command += [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'include'}"]
    command += ["-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO", "-DUSE_RPC", "-DUSE_TENSORPIPE", "-ferror-limit=1"]
    command += ["-isystem", str(torch), "-isystem", str(torch / "torch/csrc/api/include"), "-isystem", str(libraries)]
    sources = [source for layer in LAYERS for source in sorted((ROOT / "csrc" / layer).rglob("*.cpp"))]
    names = [str(source.relative_to(ROOT)) for source in sources]
    names = [name for name in names if wanted.search(name)]
    compiled = 0
    for name in names:
        start = time.monotonic()
        compiling = [*command, str(ROOT / name), "-o", str(CACHE / "object.o")]
        result = subprocess.run(compiling, capture_output=True, text=True)
        outcome = "compiles" if result.returncode == 0 else f"fails: {first_error(result.stderr)}"
        compiled += result.returncode == 0
        print(f"{name:<54} {time.monotonic() - start:4.0f} s  {outcome}", flush=True)
    print(f"\n{compiled} of {len(names)} sources compile for {TARGET}")
    return 0 if compiled == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
