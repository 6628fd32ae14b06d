"""`python -m torchrpc probe`: checks whether a host's or container's worker answers, for the probes of Kubernetes.

It loads neither torch nor C++, because it runs every few seconds.
"""

import argparse
import contextlib
import os
import re
import socket
import time

__all__ = ["main"]

DESCRIPTION = """\
Connects to the worker's port, ends its own side of the connection, and waits until the worker ends the other side.
Only a worker whose loop thread runs does that: a process that is stopped (SIGSTOP), or has not begun to listen, does
not. The probe needs no secret and joins no group, and the worker logs nothing.

It shows that the process can be called, not that its program makes progress."""

EPILOG = """\
Exit code: 0 if a worker answers, 1 if none does, 2 if the arguments are wrong."""


def _ports(text: str) -> range:
    """Return the ports of `29600` or `29600-29700`."""
    found = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text)
    ports = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
    if not ports or ports[0] < 1 or ports[-1] > 65535:
        raise argparse.ArgumentTypeError(
            f"must be a port from 1 to 65535, or a range of them (29600-29700), but is {text!r}"
        )
    return ports


def _ends_connection(host: str, port: int, seconds: float) -> bool:
    """Return whether a process accepts a connection there, and ends it when this side does."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), seconds) as connection:
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(1) == b""
    return False


def main(arguments: list[str]) -> int:
    """Run the command. Returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="torchrpc probe",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--port",
        type=_ports,
        default=os.environ.get("TORCHRPC_PORT"),
        help="the worker's port, or the range of which it has one (default: the variable TORCHRPC_PORT)",
    )
    parser.add_argument("--host", default=socket.gethostname(), help="its address (default: that of this host's name)")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS", help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.port is None:
        parser.error("--port is missing. Give the worker a fixed port by TORCHRPC_PORT, and the probe the same one")
    deadline = time.monotonic() + options.timeout
    for port in options.port:
        if _ends_connection(options.host, port, max(deadline - time.monotonic(), 0.05)):
            print(f"the worker at {options.host}:{port} answers")
            return 0
    ports = f"{options.port[0]}-{options.port[-1]}" if len(options.port) > 1 else options.port[0]
    print(f"no worker at {options.host}:{ports} answers")
    return 1
