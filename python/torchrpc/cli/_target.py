"""Attaches a command to the group that its arguments name."""

import argparse
import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchrpc._untrusted import printable

ERROR = 2  # exit code: the group cannot be inspected, or the arguments are wrong

TARGET = """\
ADDRESS is the group's MASTER_ADDR:MASTER_PORT; the default is that of the environment, or else the one group of this
user on this machine. The group's secret is read as by its workers: from --secret-file, TORCHRPC_SECRET_FILE or
TORCHRPC_SECRET. A group with identities lets members and observers look. --pid needs no secret if the group was given
none. Looking runs no function in the group."""


def parser(command: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """Return the argument parser of a command, with the arguments that all commands have."""
    made = argparse.ArgumentParser(
        prog=f"torchrpc {command}",
        description=description,
        epilog="\n\n".join([*([epilog] if epilog else []), TARGET]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("address", nargs="?", metavar="ADDRESS", help="host:port of the group")
    made.add_argument("--pid", type=int, help="a worker process of this machine, instead of ADDRESS")
    made.add_argument("--json", action="store_true", help="print plain data")
    made.add_argument("--secret-file", metavar="FILE", help="the file with the group's secret")
    made.add_argument("--identity", metavar="FILE", help="an identity file with the role member or observer")
    made.add_argument(
        "--timeout", type=float, default=2.0, metavar="S", help="seconds for a worker to answer (default: 2)"
    )
    return made


@contextlib.contextmanager
def attached(options: argparse.Namespace) -> Iterator[Any]:
    """Attach to the group that the arguments name. If that fails, end the process with an error text."""
    import torch  # noqa: F401  It loads the libraries that _C needs.

    from torchrpc.observe import attach

    address, pid = options.address, options.pid
    if address is not None and pid is not None:
        stop("Give an address or --pid, not both.")
    if not options.timeout > 0:
        stop(f"--timeout is {options.timeout}. It must be more than 0 seconds.")
    if address is None and pid is None:
        address, pid = default_target()
    if address is not None:
        check_listens(address, options.timeout)
    try:
        group = attach(
            address,
            pid=pid,
            secret_file=options.secret_file,
            identity=options.identity,
            timeout=max(5.0, options.timeout),
        )
    except Exception as error:
        stop(f"{str(error).rstrip('.')}.")
    with group:
        yield group


def default_target() -> "tuple[str | None, int | None]":
    """Return the address, or the process id, of the group to inspect if the arguments name none."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host and port:
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}", None
    groups: dict[str, dict[int, str]] = {}
    for pid, card in worker_cards():
        groups.setdefault(card.get("secret", ""), {})[pid] = card.get("name", "?")
    if not groups:
        stop(
            "No worker of this user runs on this machine. Give the group's ADDRESS, or set MASTER_ADDR and MASTER_PORT."
        )
    if len(groups) > 1:
        each = [", ".join(f"{pid} ({name})" for pid, name in sorted(found.items())[:4]) for found in groups.values()]
        stop("Several groups run on this machine. Give --pid of a worker of one of them: " + "; ".join(each) + ".")
    return None, min(next(iter(groups.values())))


def check_listens(address: str, timeout_s: float) -> None:
    """End the process if nothing listens at an address: torch's store would retry for long and log a lot."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        stop(f"{address!r} is no address. Give host:port, the MASTER_ADDR and MASTER_PORT of the group.")
    try:
        socket.create_connection((host.removeprefix("[").removesuffix("]"), int(port)), timeout_s).close()
    except (OSError, OverflowError) as error:
        stop(
            f"{address} cannot be reached: {error}. The group's rank 0, or the launcher, serves its store there. On "
            "the machine of a worker, --pid does without the store."
        )


def worker_cards() -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the process id and the worker card of each worker of this user on this machine."""
    from torchrpc.observe import _attach

    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            yield int(entry.name), dict(_attach._card(int(entry.name)))


def shortened(text: str) -> str:
    """Return the text with paths below the current folder made relative to it."""
    folder = f"{Path.cwd()}{os.sep}"
    return text.replace(folder, "") if len(folder) > 2 else text


def show(text: str) -> None:
    """Print lines that name what other workers and users have named."""
    print(printable(text, has_lines=True))


def stop(text: str) -> "Any":
    """Print an error text and end the process with the exit code ERROR."""
    print(printable(text, has_lines=True), file=sys.stderr)
    sys.exit(ERROR)


def check_name(name: str, group: Any) -> None:
    """End the process if the group has no worker of this name."""
    names = [member.name for member in group.members]
    if name not in names:
        stop(f"The group has no worker {name!r}. Its workers are {', '.join(names)}.")
