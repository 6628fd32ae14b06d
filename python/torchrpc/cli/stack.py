"""`torchrpc stack`: what each thread of each worker does."""

import json

from torchrpc.observe import _threads

from . import _target

DESCRIPTION = """\
Shows each thread of each worker: the call that it serves, of which worker and since when, what it waits for, and its
Python lines, the innermost first; also while a function keeps the GIL."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    parser = _target.parser("stack", DESCRIPTION)
    parser.add_argument("--all", action="store_true", help="show threads without Python that do nothing, too")
    parser.add_argument("--worker", metavar="NAME", help="only this worker")
    options = parser.parse_args(arguments)
    with _target.attached(options) as group:
        if options.worker is None:
            reports = group.reports(stacks=True, timeout=options.timeout)
        else:
            _target.check_name(options.worker, group)
            try:
                reports = {options.worker: group.report(options.worker, stacks=True, timeout=options.timeout)}
            except Exception as error:
                reports = {options.worker: error}
    if options.json:
        print(json.dumps(_threads.plain(reports), indent=2))
    else:
        _target.show(_target.shortened(_threads.text(reports, options.all)))
    return 0
