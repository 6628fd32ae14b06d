"""The public C++ headers compile without a warning with both compilers, in C++20 and C++23, and quickly."""

import re
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

pytestmark = pytest.mark.lint

ROOT = Path(__file__).parents[2]
USES = ROOT / "tests/cpp/public/uses.cpp"
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"]
LIBTORCH = [f"-isystem{folder}" for folder in include_paths()]
ABI = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"


def compiler_called(*names):
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"{names[0]} is not installed")
    return found


def compile_only(compiler, source, *options):
    return subprocess.run(
        [compiler, "-fsyntax-only", ABI, f"-I{ROOT / 'include'}", *LIBTORCH, *options, str(source)],
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.timeout(400)
@pytest.mark.parametrize("standard", ["c++20", "c++23"])
@pytest.mark.parametrize("names", [("g++",), ("clang++-19", "clang++")], ids=["gcc", "clang"])
def test_a_program_that_uses_every_class_has_no_warnings(names, standard):
    run = compile_only(compiler_called(*names), USES, f"-std={standard}", *WARNINGS)
    assert run.returncode == 0, run.stderr[:8000]


@pytest.mark.parametrize("header", sorted(path.name for path in (ROOT / "include/torchrpc").glob("*.h")))
def test_each_header_compiles_alone(tmp_path, header):
    source = tmp_path / "source.cpp"
    source.write_text(f"#include <torchrpc/{header}>\n")
    fastest = compiler_called("clang++-19", "clang++", "g++")
    run = compile_only(fastest, source, "-std=c++20", *WARNINGS)
    assert run.returncode == 0, run.stderr[:8000]


def test_the_program_includes_every_header():
    text = USES.read_text()
    for header in (ROOT / "include/torchrpc").glob("*.h"):
        assert f"#include <torchrpc/{header.name}>" in text, f"{header.name}: use what it has in {USES.name}"


COMMON_MACROS = "ASSERT CHECK DCHECK DEBUG DLOG ERROR EXPECT FAIL FATAL INFO LOG LOG_IF REQUIRE TEST VLOG WARNING"


@pytest.mark.timeout(400)
def test_macros_of_the_program_are_as_before_after_each_header(tmp_path):
    headers = sorted((ROOT / "include/torchrpc").glob("*.h"))
    source = tmp_path / "source.cpp"
    source.write_text(
        "\n".join(
            [f'#define {name}(x) "{name} of the program" x' for name in COMMON_MACROS.split()]
            + [f"#include <torchrpc/{header.name}>" for header in headers]
            + [
                f'static_assert(sizeof({name}("")) == sizeof("{name} of the program"));'
                for name in COMMON_MACROS.split()
            ]
        )
    )
    run = compile_only(compiler_called("g++"), source, "-std=c++20", *WARNINGS)
    assert run.returncode == 0, run.stderr[:8000]


def test_the_headers_define_no_macro_of_their_own_except_those_with_their_prefix():
    for header in (ROOT / "include/torchrpc").rglob("*.h"):
        for name in re.findall(r"^\s*#\s*define\s+(\w+)", header.read_text(), re.M):
            assert name.startswith("TORCHRPC_"), f"{header.name} defines {name}"


def seconds_to_compile(tmp_path, text):
    """The time on the processor, which the load of the machine changes little."""
    source = tmp_path / "source.cpp"
    source.write_text(text)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    run = compile_only(compiler_called("g++"), source, "-std=c++20")
    assert run.returncode == 0, run.stderr
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


@pytest.mark.timeout(400)
def test_the_main_header_adds_a_second_at_most_to_that_of_aten(tmp_path):
    added = []
    for _ in range(3):  # the machine may be busy
        aten = seconds_to_compile(tmp_path, "#include <ATen/ATen.h>\n")
        both = seconds_to_compile(tmp_path, "#include <ATen/ATen.h>\n#include <torchrpc/node.h>\n")
        added.append(both - aten)
        if added[-1] <= 1:
            return
    raise AssertionError(f"torchrpc/node.h adds {added} s to ATen/ATen.h: which header does it include for nothing?")
