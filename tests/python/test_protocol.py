"""csrc/wire/PROTOCOL.md and csrc/wire/kinds.h list the same kinds of message."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.lint

WIRE = Path(__file__).resolve().parents[2] / "csrc" / "wire"

ROW_OF_PAGE = re.compile(r"^\| (\d+) \| ([A-Z_]+) \| (one-way|reply|request|reliable request) \|", re.MULTILINE)
ROW_OF_HEADER = re.compile(r'X\(k\w+, (\d+), k(\w+), k(\w+), k(\w+), k\w+, k\w+, "(\w+)"\)')
ROLES = {"OneWay": "one-way", "Reply": "reply", "Request": "request"}


def test_the_page_lists_the_kinds_of_the_header():
    page = {(number, name, role) for number, name, role in ROW_OF_PAGE.findall((WIRE / "PROTOCOL.md").read_text())}
    header = {
        (number, name, "reliable " * (delivery == "UntilAnswered") + ROLES[role])
        for number, role, delivery, _, name in ROW_OF_HEADER.findall((WIRE / "kinds.h").read_text())
    }
    assert len(header) > 20
    assert page == header


def test_the_page_says_which_kinds_are_for_members():
    rows = ROW_OF_HEADER.findall((WIRE / "kinds.h").read_text())
    first, last = re.search(r"kinds (\d+) to (\d+)", (WIRE / "PROTOCOL.md").read_text()).groups()
    for number, _, _, sender, name in rows:
        assert (sender == "Members") == (int(first) <= int(number) <= int(last)), name
