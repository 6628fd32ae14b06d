"""`python -m torchrpc keygen`: makes the key of a group, and with it the identities of its workers."""

import argparse
import math
import os
import sys
from pathlib import Path

from torchrpc._untrusted import read_key_file

__all__ = ["main"]

DESCRIPTION = """\
Makes the key of a group, unless the file exists, and an identity for each worker that is named. An identity file has
the group's secret and a certificate: the worker's name, its role and the time until which it is valid. Give each worker
its own file, by TORCHRPC_IDENTITY_FILE or the option `identity`, and keep the group's key where no worker runs: who has
it can make identities.

Members take part in the group's own work. Clients may only call functions, and use the RRefs that they have got."""

EXAMPLE = """\
example:
  torchrpc keygen group.key --member trainer-0 trainer-1 --client client-7 --days 90
  makes group.key, trainer-0.identity, trainer-1.identity and client-7.identity"""

MEMBER, CLIENT, OBSERVER = "member", "client", "observer"
SECONDS_PER_DAY = 24 * 60 * 60
MOST_DAYS = 36_500.0


def _write_private(path: Path, text: str) -> None:
    """Write a new file that only its owner may read; fail if it exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        sys.exit(f"{path} exists already: keygen overwrites nothing. Move it away first.")
    except OSError as exc:
        sys.exit(f"{path} cannot be written: {exc.strerror}.")
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    print(f"made {path}")


def main(arguments: list[str]) -> int:
    """Run the command. Returns its exit status; exits with an error text if an argument is wrong."""
    import torch  # noqa: F401  It loads the libraries that _C needs.

    from torchrpc import _C

    parser = argparse.ArgumentParser(
        prog="torchrpc keygen",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("key", type=Path, help="the file of the group's key; made if it does not exist")
    parser.add_argument("--member", nargs="+", action="extend", default=[], metavar="NAME", help="members of the group")
    parser.add_argument("--client", nargs="+", action="extend", default=[], metavar="NAME", help="clients of the group")
    parser.add_argument(
        "--observer", nargs="+", action="extend", default=[], metavar="NAME", help="who may only look at the workers"
    )
    parser.add_argument("--days", type=float, default=365.0, help="how long the identities are valid (default: 365)")
    parser.add_argument("--folder", type=Path, default=Path(), help="of the identity files (default: this one)")
    options = parser.parse_args(arguments)
    if not (math.isfinite(options.days) and options.days <= MOST_DAYS):
        sys.exit(f"--days is {options.days:g}: give {MOST_DAYS:g} at most.")

    if options.key.exists():
        try:
            key = read_key_file(options.key)
        except OSError as exc:
            sys.exit(f"{options.key} cannot be read: {exc.strerror}.")
        except ValueError as exc:
            sys.exit(f"{options.key} cannot be the key of a group: it {exc}.")
    else:
        key = _C._make_group_key()
        _write_private(options.key, key)
    for role, names in ((MEMBER, options.member), (CLIENT, options.client), (OBSERVER, options.observer)):
        for name in names:
            try:
                identity = _C._make_identity(key, name, [role], round(options.days * SECONDS_PER_DAY))
            except TypeError:  # its text would show the key
                sys.exit(f"a worker cannot have the name {name!a}.")
            except RuntimeError as exc:
                sys.exit(f"{exc}.")
            _write_private(options.folder / f"{name}.identity", identity)
    return 0
