#!/usr/bin/env python3
"""Checks which sources of the core compile for macOS on Apple silicon: syntax and types, with a cross compiler.

Nothing is linked, and nothing is run: see docs/macos.md. The compiler is zig's clang (`pip install ziglang`), which has
the headers of macOS's C library and of libc++. The headers of torch come from its wheel for macOS, which pip downloads
into build/macos (110 MiB). Those of libuv and libsodium are the installed ones, which are the same on all systems. The
core is checked without TensorPipe, whose transport uses some parts that exist on Linux only.

Usage: tools/check_macos.py [REGEX]     (REGEX: only sources whose names match)
It prints a line for each source, with the first error if it does not compile, and exits with 1 if any source does not.
"""

import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build/macos"
TARGET = "aarch64-macos.14.0"
TORCH = "2.13.0"
SYSTEM_HEADERS = ("uv.h", "uv", "sodium.h", "sodium")
LAYERS = (
    "base",
    "wire",
    "transport",
    "peers",
    "calls",
    "group",
    "agent",
    "device",
    "profiling",
    "rref",
    "autograd",
    "optim",
    "observe",
    "node",
    "api",
)


def torch_headers() -> Path:
    """Return the include folder of torch's wheel for macOS."""
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
    """Return a folder with the headers of libuv and libsodium, and without headers of Linux."""
    include = CACHE / "libraries"
    include.mkdir(parents=True, exist_ok=True)
    for name in SYSTEM_HEADERS:
        link, header = include / name, Path("/usr/include") / name
        if not header.exists():
            raise SystemExit(f"{header} is missing: install the headers of libuv and libsodium")
        if not link.exists():
            link.symlink_to(header)
    return include


def first_error(output: str) -> str:
    """Return the first error in the compiler's output; empty if there is none."""
    for found in re.finditer(r"^(\S+?):(\d+):\d+: (?:fatal )?error: (.*)$", output, re.M):
        # zig looks for the object file, which -fsyntax-only does not write.
        if not found[3].startswith("failed to rename"):
            return f"{found[1].replace(f'{ROOT}/', '')}:{found[2]}: {found[3]}"
    return ""


def main() -> int:
    if importlib.util.find_spec("ziglang") is None:
        raise SystemExit(f"{sys.executable} has no ziglang: run pip install ziglang")
    wanted = re.compile(sys.argv[1] if len(sys.argv) > 1 else "")
    torch, libraries, precompiled = torch_headers(), library_headers(), CACHE / "pch.pch"
    command = [sys.executable, "-m", "ziglang", "c++", "-target", TARGET, "-std=c++20", "-w", "-ferror-limit=1"]
    command += [
        "-DUSE_DISTRIBUTED",
        "-DUSE_C10D_GLOO",
        "-DUSE_RPC",
        "-DUSE_TENSORPIPE",
        "-DTORCHRPC_WITHOUT_TENSORPIPE",
    ]
    command += [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'include'}"]
    command += ["-isystem", str(torch), "-isystem", str(torch / "torch/csrc/api/include"), "-isystem", str(libraries)]
    subprocess.run([*command, "-x", "c++-header", str(ROOT / "csrc/pch.h"), "-o", str(precompiled)], check=True)
    sources = [source for layer in LAYERS for source in sorted((ROOT / "csrc" / layer).rglob("*.cpp"))]
    names = [str(source.relative_to(ROOT)) for source in sources]
    names = [name for name in names if wanted.search(name) and "/tensorpipe/" not in name]
    compiled = 0
    for name in names:
        compiling = [*command, "-include-pch", str(precompiled), "-fsyntax-only", str(ROOT / name)]
        result = subprocess.run(compiling, capture_output=True, text=True, cwd=CACHE)
        error = first_error(result.stderr)
        if not error and result.returncode != 0 and "failed to rename" not in result.stderr:
            error = f"the compiler ended with {result.returncode}: {result.stderr[-200:].strip()}"
        compiled += not error
        print(f"{name:<54} {error or 'compiles'}", flush=True)
    print(f"\n{compiled} of {len(names)} sources compile for {TARGET}")
    return 0 if compiled == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
