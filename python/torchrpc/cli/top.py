"""`torchrpc top`: a live view of a running group."""

import json
import time

from torchrpc.observe import _top

from . import _target

DESCRIPTION = """\
Shows the workers of a group, live: calls per second out and in, bytes, calls in flight (made + served) and the age of
the oldest, the queue and the busy threads of the pool, RRefs (owned + held), autograd graphs (contexts), memory,
processor time and connections; then functions with their times, and the oldest calls. Calls per second and times need
metrics, which the workers count with TORCHRPC_METRICS=1."""

KEYS = """\
Keys: s sorts by the next column, Enter shows the stacks of the selected worker, Escape goes back, q ends."""

NO_TEXTUAL = "The live view needs textual: pip install 'torchrpc[top]'. Without it, --once prints the table once."


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    parser = _target.parser("top", DESCRIPTION, KEYS)
    parser.add_argument("--once", action="store_true", help="print the table once, as text, or with --json as data")
    parser.add_argument("--sort", choices=_top.SORTS, default="worker", help="the column to sort by (default: worker)")
    parser.add_argument("--every", type=float, default=1.0, metavar="S", help="seconds between looks (default: 1)")
    options = parser.parse_args(arguments)
    if not 0.05 <= options.every <= 3600:
        _target.stop(f"--every is {options.every}. It must be from 0.05 to 3600 seconds.")
    if options.json and not options.once:
        _target.stop("--json is for scripts: give --once, too.")
    if not options.once:
        try:
            from . import _top_app
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith(("textual", "rich")):
                raise
            _target.stop(NO_TEXTUAL)
    with _target.attached(options) as group:
        if not options.once:
            return _top_app.run(group, options.every, options.timeout, options.sort)
        earlier = group.reports(timeout=options.timeout)
        time.sleep(options.every)
        reports = group.reports(timeout=options.timeout)
        shown = _top.snapshot(reports, earlier, [member.name for member in group.members])
    _target.show(json.dumps(shown, indent=2) if options.json else _top.text(shown, options.sort))
    return 0
