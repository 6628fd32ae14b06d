"""`torchrpc why`: who waits for whom in a running group."""

import json
import time

from torchrpc.observe import _why

from . import _target

DESCRIPTION = """\
Says why a group stands still: deadlocks with the lines of code of each step, functions that keep the GIL, workers that
do not answer or are lost, full pools, the stragglers of shutdown and other barriers, and the longest wait."""

EXIT_CODES = """\
Exit code: 0 if nothing stands still for ever, 1 for a deadlock, 3 for a worker that is silent, lost, has a full pool or
whose GIL is kept, 2 if the group could not be looked into."""

SAMPLES_APART_S = 0.25  # between two samples: a deadlock must be in both


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = _target.parser("why", DESCRIPTION, EXIT_CODES).parse_args(arguments)
    with _target.attached(options) as group:
        earlier = group.reports(stacks=True, timeout=options.timeout)
        time.sleep(SAMPLES_APART_S)
        reports = group.reports(stacks=True, timeout=options.timeout)
        names = [member.name for member in group.members]
    explanation = _why.explain(reports, names, earlier)
    if options.json:
        print(json.dumps(explanation, indent=2))
    else:
        _target.show(_target.shortened(_why.text(explanation)))
    return _why.exit_code(explanation)
