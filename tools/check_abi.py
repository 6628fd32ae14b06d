#!/usr/bin/env python3
"""Compares the binary interface of the C++ library with the one kept in tests/abi; docs/versions.md has the policy.

It compares the functions that the library exports to programs, and, by abidiff (Debian's package abigail-tools), the
layout of the public classes, which is in the debug information of tests/cpp/public/classes.cpp. Additions are no
difference. `tools/check_abi.py --write` stores the present interface there, as for a new minor version.
"""

import argparse
import gzip
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "tests/abi"
SYMBOLS, CLASSES = KEPT / "symbols.txt", KEPT / "classes.abi.gz"
LIBRARY = ROOT / "build/release/csrc/libtorchrpc.so"
HEADERS = ROOT / "include"
PROGRAM = ROOT / "tests/cpp/public/classes.cpp"
LIBTORCH = [f"-isystem{path}" for path in include_paths()]

# The symbols that programs use: those of the public classes and functions, and of what the headers' templates use.
# FutureState is declared in the headers, but only the library knows its members.
PUBLIC = re.compile(
    r"^(?:typeinfo (?:for|name for) |vtable for )?"
    r"(?:torchrpc::v1::(?!detail::FutureState|detail::settleWithReply)|torchrpc::Error::"
    r"|torchrpc::name\(|torchrpc::toString\(torchrpc::WorkerInfo)"
)


def release() -> str:
    """Return the release of torch, whose classes are part of the interface."""
    return re.match(r"\d+\.\d+", torch.__version__)[0]


def output(*command, **options) -> str:
    run = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if run.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{run.stdout}{run.stderr}")
    return run.stdout


def public_symbols(library) -> set[str]:
    """Return the symbols of the public functions and classes that the library defines, except those of templates."""
    lines = output("nm", "-D", "--defined-only", library).splitlines()
    symbols = [line.split()[2] for line in lines if line.split()[1] in "TBDRV"]
    names = output("c++filt", input="\n".join(symbols)).splitlines()
    return {symbol for symbol, name in zip(symbols, names, strict=True) if PUBLIC.match(name)}


def write_classes(program, classes, headers=HEADERS, flags=()) -> None:
    """Write the layout of the classes in the headers, as far as the exported functions of `program` name them."""
    with tempfile.TemporaryDirectory() as folder:
        library, xml = Path(folder) / "classes.so", Path(folder) / "classes.abi"
        flags = ["-std=c++20", "-g", "-O0", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{headers}", *flags]
        output("g++", *flags, program, "-o", library)
        where = ["--no-corpus-path", "--no-comp-dir-path", "--no-show-locs", "--no-elf-needed"]
        only = ["--headers-dir", headers, "--drop-private-types", "--exported-interfaces-only"]
        output("abidw", *where, *only, library, "--out-file", xml)
        classes.write_bytes(gzip.compress(xml.read_bytes(), mtime=0))


def changed_classes(before, after) -> str:
    """Return what has changed between two files of write_classes; additions are no change."""
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for name, packed in (("before.abi", before), ("after.abi", after)):
            files.append(str(Path(folder) / name))
            Path(files[-1]).write_bytes(gzip.decompress(packed.read_bytes()))
        run = subprocess.run(["abidiff", "--no-added-syms", *files], capture_output=True, text=True)
    return run.stdout + run.stderr if run.returncode != 0 else ""


def missing_symbols(library=LIBRARY) -> list[str]:
    """Return the functions that programs may use and that the library no longer has."""
    gone = sorted(set(SYMBOLS.read_text().splitlines()[2:]) - public_symbols(library))
    return output("c++filt", input="\n".join(gone)).splitlines() if gone else []


def differences(library) -> list[str]:
    """Return, as lines of text, what programs that were built with the kept interface would miss."""
    found = []
    if gone := missing_symbols(library):
        found += ["The library no longer has these functions:", *gone]
    if not shutil.which("abidiff"):
        print("abidiff is missing (Debian: abigail-tools): the layout of classes was not compared", file=sys.stderr)
        return found
    with tempfile.TemporaryDirectory() as folder:
        now = Path(folder) / "classes.abi.gz"
        write_classes(PROGRAM, now, flags=LIBTORCH)
        if changed := changed_classes(CLASSES, now):
            found += ["Classes have changed:", changed]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the present interface")
    parser.add_argument("--library", type=Path, default=LIBRARY, help="default: %(default)s")
    options = parser.parse_args()
    if options.write:
        KEPT.mkdir(exist_ok=True)
        header = f"torch {release()}\nWritten by tools/check_abi.py --write"
        SYMBOLS.write_text("\n".join([header, *sorted(public_symbols(options.library))]) + "\n")
        write_classes(PROGRAM, CLASSES, flags=LIBTORCH)
        return
    kept_for = SYMBOLS.read_text().splitlines()[0]
    if kept_for != f"torch {release()}":
        print(f"nothing to compare: the kept interface is that with {kept_for}, and this is torch {release()}")
        return
    if found := differences(options.library):
        sys.exit(
            "\n".join(
                [*found, "", "docs/versions.md says what may change, and when to run tools/check_abi.py --write."]
            )
        )
    print("the binary interface has all that the kept one has")


if __name__ == "__main__":
    main()
