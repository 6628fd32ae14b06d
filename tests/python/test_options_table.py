"""The table of options in docs/tuning.md has every option of Python and of C++."""

import inspect
import re
from pathlib import Path

import pytest

import torchrpc.rpc as rpc

pytestmark = pytest.mark.lint

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/tuning.md").read_text()
HEADER = (ROOT / "include/torchrpc/node_options.h").read_text()


def rows():
    section = PAGE.split("### Options in Python, C++ and the environment")[1].split("\n### ")[0]
    cells = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    return [[re.findall(r"`([^`]+)`", cell) for cell in row[:3]] for row in cells[1:]]


def test_the_table_has_each_option_of_python():
    listed = [name for python, _, _ in rows() for name in python]
    options = [name for name in listed if not name.endswith(")")]
    assert sorted(options) == sorted(inspect.signature(rpc.TensorPipeRpcBackendOptions).parameters)
    arguments = inspect.signature(rpc.init_rpc).parameters
    named = [re.fullmatch(r"init_rpc\((\w+)\)", name) for name in listed]
    assert {match[1] for match in named if match} == {"name", "rank", "world_size"} <= set(arguments)


def test_the_table_has_each_option_of_cpp():
    struct = HEADER.split("struct NodeOptions {")[1].split("\n};")[0]
    fields = re.findall(r"^  (?!//)[\w:<>, ]+[ >](\w+)(?:\{\}| = [^;]+);", struct, re.MULTILINE)
    assert len(fields) > 25
    assert sorted(name for _, cpp, _ in rows() for name in cpp) == sorted(fields)


def test_options_of_both_languages_share_a_row():
    for python, cpp, _ in rows():
        for name in {*python} & {name for _, others, _ in rows() for name in others}:
            assert name in cpp, f"{name} is an option of Python and of C++, in different rows"


def test_the_variables_are_those_of_the_page():
    variables = re.findall(r"`([A-Z_]+)`", PAGE.split("## Environment variables")[1].split("\n## ")[0])
    used = {name for _, _, environment in rows() for name in environment}
    assert used - {"WORLD_SIZE"} <= {*variables}
