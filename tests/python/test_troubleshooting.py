"""The page of error messages: each message on it is one that the sources have."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.lint

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.h"), *(ROOT / "python").rglob("*.py")]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^\| `(.+?)` \| ", PAGE, re.M)


def text_of(path):
    """The file without the quotation marks and line ends between the parts of one string."""
    return re.sub(r"\"\s*\n\s*f?\"", "", path.read_text())


@pytest.fixture(scope="module")
def texts():
    return [text_of(path) for path in SOURCES]


def test_the_page_has_messages():
    assert len(MESSAGES) > 40
    assert len(set(MESSAGES)) == len(MESSAGES)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_in_the_sources(texts, message):
    parts = [part.strip() for part in message.split("…")]
    assert any(all(part in text for part in parts) for text in texts)
