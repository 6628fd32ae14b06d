"""Measures calls of the C++ library beside gRPC C++ and Cap'n Proto RPC: python benchmarks/cpp/compare

Builds the programs of this folder against the installed torchrpc, runs them one after the other in rounds, and prints a
table. Saves all measurements as JSON.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "compare"))

import machine  # noqa: E402 - of benchmarks/compare

# Column of the table -> the runs of each round for it, each a program and its arguments. If a column has several runs,
# each of its cells shows the run that was fastest in this row.
RUNS = {
    "torchrpc": ["with_torchrpc"],
    "torchrpc, TCP": ["with_torchrpc --transport tcp"],
    "gRPC": [f"with_grpc --transport {t} --api {a}" for t in ("unix", "tcp") for a in ("sync", "callback")],
    "Cap'n Proto": ["with_capnp", "with_capnp --transport tcp"],
}
TCP = {
    "gRPC, TCP": [run for run in RUNS["gRPC"] if "tcp" in run],
    "Cap'n Proto, TCP": [run for run in RUNS["Cap'n Proto"] if "tcp" in run],
}


def build(folder: Path, prefix: str) -> None:
    launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    for command in (["-S", HERE, "-B", folder, f"-DCMAKE_PREFIX_PATH={prefix}", *launcher], ["--build", folder]):
        run = subprocess.run(["cmake", *map(str, command)], capture_output=True, text=True)
        if run.returncode != 0:
            sys.exit(run.stdout + run.stderr)
        print(*re.findall(r".*is not measured.*", run.stdout), sep="\n", end="", file=sys.stderr)


def run_once(folder: Path, run: str, arguments: argparse.Namespace) -> tuple[dict, dict[str, dict]]:
    """Run a program; return its description of itself, and the results of its rows."""
    program, *options = run.split()
    command = [folder / program, *options, "--seconds", arguments.seconds, "--rows", arguments.rows]
    try:
        output = subprocess.run(
            list(map(str, command)), stdout=subprocess.PIPE, text=True, timeout=600, check=True
        ).stdout
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        sys.exit(f"{run}: {error}")
    system, *rows = map(json.loads, output.splitlines())
    return system, {row["row"]: row for row in rows}


def measure(folder: Path, arguments: argparse.Namespace) -> dict:
    runs = [run for column in RUNS.values() for run in column if (folder / run.split()[0]).exists()]
    saved: dict = {
        "date": datetime.datetime.now().isoformat(timespec="minutes"),
        "machine": machine.describe(),
        "rounds": arguments.rounds,
        "seconds": arguments.seconds,
        "versions": {},
        "others_share": [],
        "results": {run: {} for run in runs},
    }
    for round_ in range(arguments.rounds):
        first = round_ % len(runs)  # each round begins with another run
        for run in runs[first:] + runs[:first]:
            print(f"round {round_ + 1} of {arguments.rounds}: {run}", file=sys.stderr)
            machine.wait_for_quiet(arguments.wait_for_quiet)
            other_load = machine.OtherLoad()
            system, rows = run_once(folder, run, arguments)
            saved["others_share"].append(round(other_load.share(), 3))
            saved["versions"][system["system"]] = system["version"]
            for name, row in rows.items():
                saved["results"][run].setdefault(name, []).append([row["calls_per_s"], row["median_us"]])
    return saved


class Results:
    def __init__(self, saved: dict):
        self.results = saved["results"]
        self.rows = list(dict.fromkeys(name for rows in self.results.values() for name in rows))

    def best(self, column: list[str], row: str) -> str | None:
        """Return the run of a column whose median rate is the largest."""
        runs = [run for run in column if self.results.get(run, {}).get(row)]
        return max(runs, key=lambda run: self.rate(run, row), default=None)

    def rate(self, run: str, row: str) -> float:
        return statistics.median(rate for rate, _ in self.results[run][row])

    def cell(self, run: str | None, row: str) -> str:
        if run is None:
            return ""
        return f"{digits(self.rate(run, row))} /s, {time(statistics.median(us for _, us in self.results[run][row]))}"

    def ratio(self, ours: str | None, theirs: str | None, row: str) -> str:
        """Return the ratio of the calls a second: of the medians, and in brackets the least and largest of a round."""
        if ours is None or theirs is None:
            return ""
        pairs = zip(self.results[ours][row], self.results[theirs][row], strict=True)
        rounds = [mine / other for (mine, _), (other, _) in pairs]
        ratio = self.rate(ours, row) / self.rate(theirs, row)
        return f"{digits(ratio)} ({digits(min(rounds))}–{digits(max(rounds))}){' !' if ratio < 1 else ''}"

    def table(self, ours: str, others: dict[str, list[str]]) -> str:
        others = {name: column for name, column in others.items() if any(self.best(column, row) for row in self.rows)}
        lines = [["row", ours, *others, *(f"{ours} / {name}" for name in others)]]
        for row in self.rows:
            mine = self.best(RUNS[ours], row)
            theirs = [self.best(column, row) for column in others.values()]
            cells = [self.cell(run, row) for run in (mine, *theirs)]
            lines.append([row, *cells, *(self.ratio(mine, run, row) for run in theirs)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        padded = (" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
        return "\n".join(f"| {line} |" for line in padded)

    def fastest(self) -> str:
        """Return which of several runs each cell of the first table shows."""
        lines = []
        for name, column in RUNS.items():
            chosen = {row: self.best(column, row) for row in self.rows}
            for run in column:
                rows = [row for row, best in chosen.items() if best == run]
                if len(column) > 1 and rows:
                    lines.append(f"{name}: {run.partition(' ')[2] or '--transport unix'}: {'; '.join(rows)}")
        return "\n".join(lines)


def digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def time(us: float) -> str:
    return f"{digits(us)} µs" if us < 1000 else f"{digits(us / 1000)} ms"


def report(saved: dict) -> str:
    results = Results(saved)
    here, others = saved["machine"], saved["others_share"]
    return "\n".join(
        [
            f"{here['cpus']} CPUs ({here['cpu']}), {saved['date']}; "
            f"{', '.join(f'{name} {version}' for name, version in saved['versions'].items())}",
            f"medians of {saved['rounds']} rounds of {saved['seconds']:g} s a row: calls a second of all threads, and "
            "the median time of a call; ratio: of calls a second (least–largest of a round); !: below 1",
            f"other processes used {statistics.median(others):.0%} of the processors (largest {max(others):.0%})",
            "",
            "Each system as it is fastest: torchrpc in shared memory, the others over a Unix socket or TCP.",
            "",
            results.table("torchrpc", {name: RUNS[name] for name in ("gRPC", "Cap'n Proto")}),
            "",
            results.fastest(),
            "",
            "All over TCP:",
            "",
            results.table("torchrpc, TCP", TCP),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, help="5, or 1 with --quick")
    parser.add_argument("--seconds", type=float, help="time of each row: 0.5, or 0.05 with --quick")
    parser.add_argument("--rows", default="", metavar="REGEX", help="the names of the rows to measure (all)")
    parser.add_argument("--quick", action="store_true", help="one short round, to see that it works")
    parser.add_argument(
        "--wait-for-quiet",
        type=float,
        default=10,
        metavar="SECONDS",
        help="longest wait before each program for other processes of this machine to be idle (%(default)s)",
    )
    parser.add_argument("--build", type=Path, default=Path("build/cpp_compare"), help="build folder (%(default)s)")
    parser.add_argument("--prefix", help="where torchrpc is installed (torchrpc.cmake_prefix_path)")
    parser.add_argument("--output", type=Path, help="the measurements (results.json in the build folder)")
    parser.add_argument("--show", type=Path, metavar="JSON", help="print saved measurements again and exit")
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 5)
    arguments.seconds = arguments.seconds or (0.05 if arguments.quick else 0.5)
    if arguments.show:
        print(report(json.loads(arguments.show.read_text())))
        return
    if arguments.prefix is None:
        import torchrpc

        arguments.prefix = torchrpc.cmake_prefix_path
    os.makedirs(arguments.build, exist_ok=True)
    build(arguments.build, arguments.prefix)
    saved = measure(arguments.build.resolve(), arguments)
    output = arguments.output or arguments.build / "results.json"
    output.write_text(json.dumps(saved, indent=1))
    print(report(saved))


if __name__ == "__main__":
    main()
