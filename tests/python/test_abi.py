"""tools/check_abi.py: the library has the binary interface that is kept in tests/abi, and the check finds changes."""

import gzip
import importlib.util
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.lint

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
#include "options.h"
__attribute__((visibility("default"))) int portOf(const Options& options) { return options.port; }
"""


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("check_abi", ROOT / "tools/check_abi.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if module.SYMBOLS.read_text().splitlines()[0] != f"torch {module.release()}":
        pytest.skip(f"the kept interface is that with another torch than {module.release()}")
    return module


@pytest.fixture
def library(check):
    if not check.LIBRARY.exists():
        pytest.skip("the library is not built: `make package` does it")
    return check.LIBRARY


@pytest.fixture
def abidiff():
    if not shutil.which("abidiff"):
        pytest.skip("abidiff is not installed (Debian: abigail-tools)")


def test_the_library_has_all_functions_that_programs_may_use(check, library):
    assert len(check.SYMBOLS.read_text().splitlines()) > 50
    assert check.missing_symbols(library) == [], "see docs/versions.md, and tools/check_abi.py --write"


def test_a_function_that_is_gone_is_found(check, library, tmp_path, monkeypatch):
    kept = tmp_path / "symbols.txt"
    kept.write_text(check.SYMBOLS.read_text() + "_ZN8torchrpc2v14Node5pauseEv\n")
    monkeypatch.setattr(check, "SYMBOLS", kept)
    assert check.missing_symbols(library) == ["torchrpc::v1::Node::pause()"]


@pytest.mark.timeout(400)
def test_the_public_classes_have_the_layout_that_is_kept(check, abidiff, tmp_path):
    check.write_classes(check.PROGRAM, tmp_path / "now.gz", flags=check.LIBTORCH)
    changed = check.changed_classes(check.CLASSES, tmp_path / "now.gz")
    assert not changed, f"{changed}\nsee docs/versions.md, and tools/check_abi.py --write"
    assert b"class-decl name='NodeOptions'" in gzip.decompress(check.CLASSES.read_bytes())


def test_a_class_that_has_changed_is_found(check, abidiff, tmp_path):
    (tmp_path / "program.cpp").write_text(PROGRAM)
    for version, members in (("a", "int port;"), ("b", "int port; int more;"), ("c", "int port; // same\n")):
        (tmp_path / "options.h").write_text(f"struct Options {{ {members} }};\n")
        check.write_classes(tmp_path / "program.cpp", tmp_path / f"{version}.gz", headers=tmp_path)
    assert "type size changed" in check.changed_classes(tmp_path / "a.gz", tmp_path / "b.gz")
    assert check.changed_classes(tmp_path / "a.gz", tmp_path / "c.gz") == ""
