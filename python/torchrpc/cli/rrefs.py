"""`torchrpc rrefs`: which RRefs a group has, and who holds them."""

import argparse
import json

from torchrpc.observe import _reports, _rrefs

from . import _target

DESCRIPTION = """\
Shows the RRefs of a group: their owner, who holds them, their age, and where they were made if the workers record that.
RRefs of one kind from one line are one row, so that a leak stands out."""


def _age(text: str) -> float:
    try:
        return _reports.seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    parser = _target.parser("rrefs", DESCRIPTION)
    parser.add_argument("--older-than", type=_age, default=0.0, metavar="AGE", help="only older ones: 30s, 10m, 2h, 1d")
    parser.add_argument("--worker", metavar="NAME", help="only those that this worker owns, holds or has made")
    options = parser.parse_args(arguments)
    with _target.attached(options) as group:
        if options.worker is not None:
            _target.check_name(options.worker, group)
        reports = group.reports(rrefs=True, timeout=options.timeout)
    found = _rrefs.groups(reports, options.older_than, options.worker or "")
    if options.json:
        print(json.dumps({"rrefs": found, "silent": _reports.silent(reports)}, indent=2))
    else:
        found = [row | {"made_at": _target.shortened(row["made_at"])} for row in found]
        _target.show(_rrefs.text(found, reports, options.older_than))
    return 0
