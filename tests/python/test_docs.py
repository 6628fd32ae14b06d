"""The documentation is right: its Python blocks and examples run, its commands and names exist."""

import doctest
import functools
import importlib
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import blocks, run_fragments
from waiting import eventually

import torchrpc.rpc as rpc
from torchrpc import testing
from torchrpc.__main__ import INSPECTING, USAGE

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name(page):
    return str(page.relative_to(ROOT))


PYTHON = [(page, block) for page in PAGES for block in blocks(page) if block.language == "python"]
WITH_FRAGMENTS = sorted({page for page, block in PYTHON if not block.is_program})
PROGRAMS = {
    block.code: pytest.param(block, id=f"{name(page)}:{block.line}") for page, block in PYTHON if block.is_program
}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_code_of_a_page_is_narrow_enough_to_read_without_scrolling(page):
    wide = [
        line
        for block in blocks(page)
        if block.language == "python"
        for line in block.code.splitlines()
        if len(line) > 74
    ]
    assert not wide


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """This process is worker0 of three; all of them can import modules from the folder."""
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        with testing.workers(3):
            yield folder


@pytest.mark.parametrize("page", WITH_FRAGMENTS, ids=name)
def test_the_fragments_of_a_page_run(folder, tmp_path, monkeypatch, request, page):
    eventually(lambda: rpc._get_debug_info()["agent.num_pending_calls"] == "0")  # those of the page before it
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger("torchrpc")
    request.addfinalizer(functools.partial(logger.setLevel, logger.level))  # the page about the log changes it
    run_fragments(page, "page_" + page.stem, folder)


@pytest.mark.parametrize("block", PROGRAMS.values())
def test_a_program_on_a_page_runs(run_python, tmp_path, block):
    program = tmp_path / "example.py"
    program.write_text(block.code)
    env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(testing.free_port()), "OMP_NUM_THREADS": "1"}
    printed = run_python(program, env=env).stdout.splitlines()
    assert block.printed, "a program should say what it prints"
    assert not set(block.printed) - set(printed)


# --- Examples in docstrings ---

WITH_EXAMPLES = """
    autograd launch nn.remote_module optim.distributed profiler rpc.functions
    rpc._calls.sending rpc._calls.batching rpc._calls.waiting
"""
PRELUDE = """
import torch
import torchrpc
import torchrpc.autograd as dist_autograd
import torchrpc.profiler
import torchrpc.rpc as rpc
from torch import nn
from torchrpc.nn import RemoteModule
from torchrpc.optim import DistributedOptimizer
"""


def examples():
    for module in WITH_EXAMPLES.split():
        found = doctest.DocTestFinder().find(importlib.import_module(f"torchrpc.{module}"))
        yield from (pytest.param(example, id=example.name) for example in found if example.examples)


@pytest.mark.parametrize("example", list(examples()))
def test_the_example_of_a_docstring_runs(folder, tmp_path, monkeypatch, example):
    monkeypatch.chdir(tmp_path)
    lines = [
        f"print({part.source.strip()})  # {want}" if (want := part.want.strip()) else part.source
        for part in example.examples
    ]
    page = tmp_path / "example.md"
    page.write_text(f"```python\n{PRELUDE}\n" + "\n".join(lines) + "\n```\n")
    run_fragments(page, "example_" + re.sub(r"\W", "_", example.name), folder)


# --- Commands and names ---


def commands():
    for page in PAGES:
        for block in blocks(page):
            if block.language in ("sh", "shell", "bash"):
                for line in re.sub(r"\\\n", " ", block.code).splitlines():
                    if line.strip():
                        yield pytest.param(line.partition(" #")[0], id=f"{name(page)}: {line}")


def options_of(text):
    return set(re.findall(r"(?<=\s)--([a-z-]+)", text))


SOURCES = [
    path
    for folder in ("csrc", "python", "tutorials")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".cpp", ".h")
]


@pytest.mark.parametrize("command", list(commands()))
def test_files_and_options_of_a_command_exist(command):
    words = command.split()
    while re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    if words[0] == "make":
        targets = set(re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.M))
        assert {words[1]} <= {word for target in targets for word in target.split()}
    for word in words:
        if re.match(r"(tutorials|benchmarks|tools|tests|docs)/\S+\.py$", word):
            source = (ROOT / word).read_text()
            assert not {option for option in options_of(command) - {"help"} if f'"--{option}' not in source}


# Names of upstream's module that programs seldom use.
UPSTREAMS = """
    torchrpc.autograd.DistAutogradContext torchrpc.rpc.AllGatherStates torchrpc.rpc.Backend torchrpc.rpc.BackendType
    torchrpc.rpc.BackendValue torchrpc.rpc.PyRRef torchrpc.rpc.RemoteProfilerManager torchrpc.rpc.RpcAgent
    torchrpc.rpc.RpcBackendOptions torchrpc.rpc.TensorPipeAgent torchrpc.rpc.api torchrpc.rpc.backend_registry
    torchrpc.rpc.constants torchrpc.rpc.construct_rpc_backend_options torchrpc.rpc.enable_gil_profiling
    torchrpc.rpc.functions torchrpc.rpc.init_backend torchrpc.rpc.internal torchrpc.rpc.options torchrpc.rpc.rref_proxy
    torchrpc.rpc.server_process_global_profiler
"""


def test_each_public_name_is_on_a_page_of_the_api():
    pages = [*(ROOT / "docs/api").glob("*.md"), ROOT / "docs/exceptions.md"]
    text = "\n".join(page.read_text() for page in pages)
    written = set(re.findall(r"[\w.]+", text))
    names = (ROOT / "tests/python/public_names.txt").read_text().split()
    # A name of torchrpc.rpc that torchrpc has, too, is described once.
    once = {f"torchrpc.{each.removeprefix('torchrpc.rpc.')}" for each in written} | {
        each.replace("torchrpc.", "torchrpc.rpc.", 1) for each in written
    }
    assert sorted(set(names) - written - once - set(UPSTREAMS.split())) == []


def test_each_command_is_in_the_table_of_commands():
    usage = re.findall(r"python -m torchrpc ([a-z|]+) ", USAGE)
    commands = {command for each in usage for command in each.split("|")}
    assert {"doctor", "keygen", "probe", *INSPECTING} == commands
    table = (ROOT / "docs/api/torchrpc.md").read_text()
    assert set(re.findall(r"^\| `python -m torchrpc ([a-z]+)` \|", table, re.M)) == commands


@pytest.mark.parametrize("page", sorted({*PAGES, *ROOT.glob("*.md"), *(ROOT / "csrc").rglob("*.md")}), ids=name)
def test_files_that_a_page_links_to_exist(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)  # a lambda of C++ is no link
    for target in re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", prose):
        assert (page.parent / target).exists(), target


def test_every_variable_on_a_page_is_read_somewhere():
    source = "\n".join(path.read_text() for path in SOURCES) + (ROOT / "setup.py").read_text()
    source += "".join(path.read_text() for path in ROOT.glob("**/CMakeLists.txt") if "build" not in path.parts)
    for page in PAGES:
        for variable in set(re.findall(r"\bTORCHRPC_[A-Z_]+\b", page.read_text())):
            assert variable in source, f"{name(page)} names {variable}"


def test_every_variable_that_is_read_is_on_the_page_about_tuning():
    # The sources have the names of environment variables in quotes.
    quoted = {found for path in SOURCES for found in re.findall(r'"(TORCHRPC_[A-Z_]+)"', path.read_text())}
    assert quoted, "the sources read no variable at all?"
    assert not [variable for variable in quoted if variable not in (ROOT / "docs" / "tuning.md").read_text()]


# --- The site ---


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("furo", reason="the tools of the site are not installed: `make setup-docs` installs them")
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", ROOT / "docs", tmp_path / "html"]
    result = subprocess.run(build, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "html" / "index.html").exists()
