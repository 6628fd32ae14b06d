"""The pages of the C++ API: every declaration is documented, the site links to the reference, the snippets compile."""

import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from doc_pages import blocks
from torch.utils.cpp_extension import include_paths

pytestmark = pytest.mark.lint

ROOT = Path(__file__).resolve().parents[2]


def doxygen(folder, **settings):
    if not shutil.which("doxygen"):
        pytest.skip("doxygen is missing")
    (folder / "pages").mkdir()
    settings = {"OUTPUT_DIRECTORY": folder / "pages", **settings}
    text = (ROOT / "tools/Doxyfile").read_text() + "".join(f"{key} = {value}\n" for key, value in settings.items())
    return subprocess.run(["doxygen", "-"], input=text, cwd=ROOT, capture_output=True, text=True, timeout=100)


def test_the_pages_build_without_warnings(tmp_path):
    run = doxygen(tmp_path)
    assert run.returncode == 0 and not run.stderr, run.stderr
    assert (tmp_path / "pages/html/classtorchrpc_1_1v1_1_1Node.html").exists()


def test_an_undocumented_declaration_is_an_error(tmp_path):
    (tmp_path / "bad.h").write_text("namespace torchrpc {\n/// Said.\nstruct Said {\n  void unsaid();\n};\n}\n")
    run = doxygen(tmp_path, INPUT=tmp_path / "bad.h")
    assert run.returncode != 0
    assert "unsaid" in run.stderr


# --- the site ---


def site_settings():
    settings = {"__file__": str(ROOT / "docs/conf.py")}
    exec((ROOT / "docs/conf.py").read_text(), settings)
    return SimpleNamespace(**settings)


@pytest.mark.parametrize("has_doxygen", [True, False])
def test_the_links_to_the_reference_lead_to_its_pages(tmp_path, monkeypatch, has_doxygen):
    conf = site_settings()
    if has_doxygen and not shutil.which("doxygen"):
        pytest.skip("doxygen is missing")
    if not has_doxygen:
        monkeypatch.setattr(shutil, "which", lambda name: None)
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/Doxyfile", tmp_path / "tools")
    shutil.copytree(ROOT / "include", tmp_path / "include")
    conf.make_cpp_pages.__globals__["ROOT"] = tmp_path
    conf.make_cpp_pages(None, None)
    links = re.findall(r'href="(cpp-api/[^"]+)"', (ROOT / "docs/cpp.md").read_text())
    assert links and conf.html_extra_path == ["../build/cpp-site"]
    for link in links:
        assert (tmp_path / "build/cpp-site" / link).exists(), link
    pages = list((tmp_path / "build/cpp-site/cpp-api").glob("*.html"))
    assert any("TORCHRPC_STRUCT" in page.read_text() for page in pages) == has_doxygen


# --- the pages of docs/cpp ---

PAGES = sorted((ROOT / "docs/cpp").glob("*.md"))
PRELUDE = """
#include <ATen/ATen.h>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <mutex>
#include <torchrpc/autograd.h>
#include <torchrpc/function.h>
#include <torchrpc/node.h>
#include <torchrpc/optim.h>
#include <torchrpc/struct.h>
using namespace std::chrono_literals;
"""


@pytest.mark.timeout(400)
def test_the_snippets_compile(tmp_path):
    """All pages are one program, so a name may be on one page only."""
    source = PRELUDE
    others = [ROOT / "docs" / f"{name}.md" for name in ("cpp_futures", "devices", "named_objects")]
    for page in [*PAGES, *others]:
        for block in blocks(page):
            if block.language == "cpp":
                source += f'#line {block.line} "{page}"\n{block.code}'
    (tmp_path / "snippets.cpp").write_text(source)
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", abi, f"-I{ROOT / 'include'}"]
    flags += [f"-isystem{folder}" for folder in include_paths()]
    run = subprocess.run(
        ["c++", *flags, str(tmp_path / "snippets.cpp")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert source.count("#line") >= 10
    assert run.returncode == 0, run.stderr[:8000]


def test_each_topic_is_linked():
    listed = re.findall(r"\]\(cpp/(\w+)\.md\)", (ROOT / "docs/cpp.md").read_text())
    assert sorted(set(listed)) == [page.stem for page in PAGES]


def test_each_header_is_in_the_table_of_headers():
    rows = re.findall(r"^\| (`torchrpc/.*?) \|", (ROOT / "docs/cpp.md").read_text(), re.M)
    listed = [header for row in rows for header in re.findall(r"`torchrpc/(\w+\.h)`", row)]
    assert sorted(listed) == sorted(header.name for header in (ROOT / "include/torchrpc").glob("*.h"))


def test_the_page_on_errors_has_every_code():
    codes = re.findall(r"^  (k\w+) = \d+,", (ROOT / "include/torchrpc/error.h").read_text(), re.M)
    page = (ROOT / "docs/cpp/errors.md").read_text()
    assert len(codes) >= 18
    assert [code for code in codes if f"| `{code}` |" not in page] == []
