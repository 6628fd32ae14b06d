"""Compares torchrpc with torch's own RPC, and with Ray, gRPC and Monarch where they are installed.

    python benchmarks/compare [--quick] [--rows REGEX]

In each round, each session of rows runs on one system after the other, in fresh processes. The rows are written once,
for torch.distributed.rpc; TORCHRPC_REPLACE=1 in the environment of the processes replaces it by torchrpc. Prints a
table for each transport. Saves all measurements as JSON after each session, and a picture of the ratios as PNG at the
end.
"""

import argparse
import datetime
import json
import os
import re
import sys
from itertools import groupby
from pathlib import Path

import group_rows  # noqa: F401 - fills ROWS
import machine
import pair_rows  # noqa: F401 - fills ROWS
import report
from rows import ROWS
from systems import KNOWN, OURS, TRANSPORTS, Failed, System, installed, run_session
from tqdm import tqdm


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="", metavar="REGEX", help='run only rows whose "session: name" matches')
    parser.add_argument("--rounds", type=int, default=None, help="default: 3; with --quick: 1")
    parser.add_argument("--transports", default=",".join(TRANSPORTS), help="a list of %(default)s")
    parser.add_argument(
        "--systems",
        default=",".join(installed()),
        metavar="A,B,…",
        help=f"a list of {', '.join(KNOWN)}; the first is the baseline (%(default)s)",
    )
    parser.add_argument(
        "--also",
        nargs="+",
        action="append",
        default=[],
        metavar=("LABEL", "VARIABLE=VALUE"),
        help="adds a column: torchrpc with these environment variables, for example PYTHONPATH=… for another build",
    )
    parser.add_argument("--seconds", type=float, default=None, help="time for each measurement (1; with --quick: 0.1)")
    parser.add_argument("--row-seconds", type=float, default=90, help="time limit of a row (%(default)s)")
    parser.add_argument(
        "--wait-for-quiet",
        type=float,
        default=10,
        metavar="SECONDS",
        help="longest wait before each session for other processes on this machine to be idle (%(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="one short round, to check that everything works")
    parser.add_argument("--output", type=Path, default=Path("compare"), help="prefix of .json and .png (%(default)s)")
    parser.add_argument("--list", action="store_true", help="list the rows and exit")
    parser.add_argument("--show", type=Path, metavar="JSON", help="print and draw saved results again and exit")
    arguments = parser.parse_args(argv)
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 3)
    arguments.seconds = arguments.seconds or (0.1 if arguments.quick else 1.0)
    for option, known in (("systems", KNOWN), ("transports", TRANSPORTS)):
        chosen = getattr(arguments, option).split(",")
        unknown = [name for name in chosen if name not in known]
        if unknown:
            parser.error(f"--{option}: unknown name {unknown[0]!r}; known names are {', '.join(known)}")
        setattr(arguments, option, chosen)
    arguments.rows = [row for row in ROWS.values() if re.search(arguments.rows, f"{row.session}: {row.name}")]
    if not arguments.rows:
        parser.error("--rows: no row matches; --list shows all rows")
    return arguments


def chosen_systems(arguments: argparse.Namespace) -> list[System]:
    systems = [KNOWN[label] for label in arguments.systems]
    for label, *variables in arguments.also:
        environment = OURS | dict(variable.split("=", 1) for variable in variables)
        systems.append(System(label, environment, tcp=KNOWN["torchrpc"].tcp))
    return systems


class Comparison:
    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.systems = chosen_systems(arguments)
        # Sessions keep the order of their first rows.
        order = list(dict.fromkeys(row.session for row in arguments.rows))
        rows = sorted(arguments.rows, key=lambda row: order.index(row.session))
        self.sessions = [list(group) for _, group in groupby(rows, lambda row: row.session)]
        self.saved: dict = {
            "date": datetime.datetime.now().isoformat(timespec="minutes"),
            "machine": machine.describe(),
            "settings": {"rounds": arguments.rounds, "seconds": arguments.seconds},
            "systems": [{"label": each.label, "kind": each.kind} for each in self.systems],
            "versions": {},
            "others_share": [],
            "transports": arguments.transports,
            "rows": [{"name": row.name, "unit": row.unit, "targets": row.targets} for row in rows],
            "results": {name: {} for name in arguments.transports},
        }

    def run(self) -> None:
        plan = [
            (system, transport, rows)
            for round_ in range(self.arguments.rounds)
            for rows in self.sessions
            for transport in self.arguments.transports
            for system in self._rotated(round_)
        ]
        with tqdm(plan, unit="session") as progress:
            for system, transport, rows in progress:
                rows = [row for row in rows if system.runs(row, transport)]
                if rows:
                    progress.set_description(f"{rows[0].session}, {transport}, {system.label}")
                    machine.wait_for_quiet(self.arguments.wait_for_quiet)
                    other_load = machine.OtherLoad()
                    self._session(system, transport, rows)
                    self.saved["others_share"].append(round(other_load.share(), 3))
                    self.save()

    def _rotated(self, round_: int) -> list[System]:
        """Return the systems in the order of this round: each round starts with another system."""
        first = round_ % len(self.systems)
        return self.systems[first:] + self.systems[:first]

    def _session(self, system: System, transport: str, rows: list) -> None:
        settings = self.arguments.seconds, self.arguments.row_seconds
        for name, outcome in run_session(system, transport, rows, *settings):
            if name == "versions":
                self.saved["versions"][system.label] = outcome
                continue
            cell = self.saved["results"][transport].setdefault(name, {}).setdefault(system.label, [])
            if isinstance(outcome, Failed):
                tqdm.write(f"{name}: {system.label}, {transport}: failed: {outcome}", file=sys.stderr)
                cell.append({"failed": str(outcome)})
            else:
                cell.append(outcome)

    def save(self) -> None:
        self.saved["machine"]["load_after"] = os.getloadavg()[0]
        self.arguments.output.with_suffix(".json").write_text(json.dumps(self.saved, indent=1, ensure_ascii=False))


def main() -> None:
    arguments = parse()
    if arguments.list:
        for row in arguments.rows:
            print(f"{row.session}: {row.name}")
        return
    if arguments.show:
        saved = json.loads(arguments.show.read_text())
    else:
        comparison = Comparison(arguments)
        comparison.run()
        saved = comparison.saved
    print(report.everything(saved))
    report.plot(saved, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
