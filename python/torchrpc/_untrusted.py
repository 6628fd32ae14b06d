"""Reads what other users and workers may have written: files of keys, cards of workers, and texts for a terminal.

This module imports nothing of the package, because commands use it without a group. Any thread may call its functions.
"""

import os
import re
import stat
from pathlib import Path
from typing import Any

_MOST_KEY_BYTES = 1 << 16

# Control characters (but for tabs), marks that change the direction of a text, and halves of surrogate pairs.
_UNPRINTABLE = "\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_IN_LINES = re.compile(f"[{_UNPRINTABLE}]")
_IN_A_LINE = re.compile(f"[\n{_UNPRINTABLE}]")


def printable(text: str, has_lines: bool = False) -> str:
    """Return a text in which characters that a terminal or the reader of a log would take for something else are
    escaped, as in a str's repr.

    Args:
        has_lines: whether the text consists of lines; otherwise line breaks are escaped, too.
    """
    return (_IN_LINES if has_lines else _IN_A_LINE).sub(lambda match: ascii(match[0])[1:-1], text)


def printable_data(value: Any) -> Any:
    """Return plain data whose texts are printable lines."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_data(key): printable_data(each) for key, each in value.items()}
    return [printable_data(each) for each in value] if isinstance(value, list) else value


def read_file(path: "Path | str", most_bytes: int, owners: "set[int]", is_private: bool = False) -> bytes:
    """Return the contents of a plain file. Nothing else is read, and no other file is opened in a way that blocks.

    Args:
        owners: the ids of the users of whom one must own the file.
        is_private: whether no user but the owner may read or write it.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not plain, is too large, belongs to another user, or is not private. The text completes
            a sentence that begins with the file's name, such as "belongs to another user (7)".
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is no plain file")
        if status.st_size > most_bytes:
            raise ValueError(f"has more than {most_bytes} bytes")
        if status.st_uid not in owners:
            raise ValueError(f"belongs to another user ({status.st_uid})")
        if is_private and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ValueError(f"may be read or written by others than its owner: run chmod 600 {path}")
        return file.read(most_bytes)


def read_key_file(path: "Path | str") -> str:
    """Return the text of a file with a secret or a key, which only this user, or root, may read.

    Raises:
        OSError: the file cannot be read.
        ValueError: as for `read_file`; or the file's bytes are not text.
    """
    data = read_file(path, _MOST_KEY_BYTES, {os.geteuid(), 0}, is_private=True)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError("has bytes that are no text") from None
