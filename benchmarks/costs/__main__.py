"""Counts what one call costs on its caller and on its callee: a table without the noise of times.

    python benchmarks/costs                              # counts, and compares with the kept table, costs.json
    python benchmarks/costs --write                      # keeps the counts: costs.json and costs.md. Commit both
    python benchmarks/costs --where mutexes --rows '^torch.add$' --depth 8    # the places that lock mutexes

It counts heap allocations, mutex acquisitions and copied bytes with a library that it compiles with the system's
compiler and preloads (counters.c), context switches by /proc, and with --instructions the instructions in user space,
by perf where it counts, else by callgrind (valgrind), which takes a few minutes. Nothing needs root. Threads do not
spin while they wait (TORCHRPC_SPIN_US=0), and each worker has one core, so counts depend little on the machine.

"Own" are the counts of torchrpc's libraries, without what Python, torch and libc count in functions that these call.
The comparison, and the test test_costs.py, look at own allocations and mutexes only.
"""

import argparse
import json
import platform
import re
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from calls import KNOWN, ROWS, Group, is_cpp, rows_of
from counters import INSTRUCTIONS, Callgrind, Counts, Library, Modules, switches

SIDES = ("caller", "callee")
TRANSPORTS = {"shm": "shared memory", "tcp": "TCP"}
KEPT = Path(__file__).with_name("costs.json")
COMPARED = ("allocations", "mutexes")
# A row may grow by so much: 2 %, or less than one event in each call.
SHARE, EVENTS = 0.02, 0.75
# A thread that waits locks mutexes to do so. On a busy machine threads wait more often, for each other and for a core.
MUTEXES_OF_A_WAIT = 4
ADVICE = """\
See where they come from:
    python benchmarks/costs --where {name} --side {side} --transports {transport} --rows '^{row}$' --depth 8
Remove them, or let only those calls pay that use the feature. If they are worth it, keep the new counts with
    python benchmarks/costs --write --instructions
and say in the commit's message why."""

Costs = dict[str, dict[str, dict[str, Counts]]]  # by transport, row and side


# --- counting --------------------------------------------------------------------------------------------------------
def counted(group: Group, library: Library, row: str, calls: int) -> list[Counts]:
    """Make calls of a row; return the counts of one call on the caller and on the callee."""
    before = [(library.read(pid), switches(pid)) for pid in group.pids]
    made = group.make(row, calls)
    sides = []
    for pid, (places_before, switches_before) in zip(group.pids, before, strict=True):
        counts: Counts = defaultdict(float)
        modules = Modules(pid)
        for place, events in library.read(pid).items():
            if more := events - places_before.get(place, 0):
                counts["all_" + place.kind] += more / made
                counts[place.kind] += more / made if modules.is_ours(place.frames[0]) else 0
        counts["switches"] = (switches(pid) - switches_before) / made
        sides.append(counts)
    return sides


def by_language(rows: list[str]) -> Iterator[tuple[bool, list[str]]]:
    """Yield whether the calls of the rows are C++'s, and the rows: those of Python's first."""
    for in_cpp in (False, True):
        if chosen := [row for row in rows if is_cpp(row) == in_cpp]:
            yield in_cpp, chosen


def measure(system: str, transport: str, rows: list[str], calls: int, rounds: int) -> dict[str, dict[str, Counts]]:
    """Return the medians over rounds by row and side, and the largest count of those that are compared."""
    taken: dict[tuple[str, str], list[Counts]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        library = Library(Path(folder))
        for in_cpp, chosen in by_language(rows):
            with Group(system, transport, in_cpp, lambda _: [], library.variables) as group:
                for pid in group.pids:
                    library.start(pid)
                for row in chosen:
                    group.make(row, 50)
                for _ in range(rounds):
                    for row in chosen:
                        for side, counts in zip(SIDES, counted(group, library, row, calls), strict=True):
                            taken[row, side].append(counts)
    costs: dict[str, dict[str, Counts]] = {row: {} for row in rows}
    for (row, side), all_rounds in taken.items():
        names = sorted({name for counts in all_rounds for name in counts})
        columns = {name: [counts.get(name, 0.0) for counts in all_rounds] for name in names}
        medians = {name: round(statistics.median(column), 2) for name, column in columns.items()}
        smallest = {f"smallest_{name}": round(min(columns.get(name, [0.0])), 2) for name in COMPARED}
        largest = {f"largest_{name}": round(max(columns.get(name, [0.0])), 2) for name in COMPARED}
        costs[row][side] = {**medians, **smallest, **largest}
    return costs


def count_instructions(
    system: str, transport: str, rows: list[str], calls: int, counter, inside: str | None
) -> dict[str, dict[str, Counts]]:
    """Return the instructions by row and side. The rows are of one language."""
    costs = {}
    with Group(system, transport, is_cpp(rows[0]), counter.command, {}) as group:
        counter.attach(group.pids)
        for number, row in enumerate(rows, 1):
            group.make(row, 50)
            counter.start()
            made = group.make(row, calls)
            costs[row] = {
                side: {name: round(total / made) for name, total in counts.items()}
                for side, counts in zip(SIDES, counter.stop(), strict=True)
            }
            if inside:
                for side, count in zip(SIDES, counter.inside(inside, number), strict=True):
                    costs[row][side]["inside"] = round(count / made)
    return costs


# --- comparing -------------------------------------------------------------------------------------------------------
def grown(kept: Costs, new: Costs) -> Iterator[tuple[str, str, str]]:
    """Yield transport, row and a text for each count of which even the smallest is above all that was kept."""
    for transport, rows in new.items():
        for row, sides in rows.items():
            for side, counts in sides.items():
                before = kept.get(transport, {}).get(row, {}).get(side)
                for name in COMPARED if before else ():
                    most, now = before[f"largest_{name}"], counts[f"smallest_{name}"]
                    waits = max(0, counts["switches"] - before["switches"]) if name == "mutexes" else 0
                    if now > most + max(SHARE * most, EVENTS) + MUTEXES_OF_A_WAIT * waits:
                        where = f"{TRANSPORTS[transport]}, {ROWS[row]}: {name} of the {side}"
                        advice = ADVICE.format(name=name, side=side, transport=transport, row=re.escape(row))
                        yield transport, row, f"{where} grew from {most:g} to {now:g} a call. {advice}"


# --- reports ---------------------------------------------------------------------------------------------------------
def table(costs: Costs, systems: str = "") -> str:
    columns = {
        "allocations": "allocations",
        "mutexes": "mutexes",
        "copied_bytes": "copied bytes",
        "instructions": "instructions",
    }
    lines = []
    for transport, rows in costs.items():
        lines += [f"{TRANSPORTS[transport]}{systems}:", ""]
        lines += ["| call | " + " | ".join(columns.values()) + " | context switches |", "|-|" + "-|" * 5]
        for row, sides in rows.items():
            cells = []
            for name in columns:
                both = [(sides[side].get(name), sides[side].get("all_" + name)) for side in SIDES]
                cells.append(" / ".join(f"{shown(own)} ({shown(everything)})" for own, everything in both))
            cells = ["" if cell == " () /  ()" else cell for cell in cells]
            cells.append(" / ".join(f"{sides[side].get('switches', 0):.1f}" for side in SIDES))
            lines.append(f"| {ROWS[row]} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def shown(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}".removesuffix(".0")


def show_places(transport: str, rows: list[str], calls: int, kind: str, depth: int, side: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        library = Library(Path(folder), depth)
        for in_cpp, chosen in by_language(rows):
            with Group("torchrpc", transport, in_cpp, lambda _: [], library.variables) as group:
                pid = group.pids[SIDES.index(side)]
                library.start(pid)
                for row in chosen:
                    group.make(row, calls)
                    before = library.read(pid)
                    made = group.make(row, calls)
                    more = {p: n - before.get(p, 0) for p, n in library.read(pid).items() if p.kind == kind}
                    often = sorted((p for p in more if more[p] / made > 0.02), key=lambda p: -more[p])
                    names = Modules(pid).functions({frame for place in often for frame in place.frames})
                    print(f"{ROWS[row]}: {kind} of the {side}, {TRANSPORTS[transport]}\n")
                    for place in often:
                        frames = "\n          < ".join(names[frame] for frame in place.frames)
                        print(f"{more[place] / made:8.2f} ", frames)


def main() -> None:
    counters = {name: each for name, each in INSTRUCTIONS.items() if each.works()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="torchrpc", help="a list of torch, torchrpc, metrics … (%(default)s)")
    parser.add_argument("--transports", default="shm,tcp", help="a list of shm, tcp (%(default)s)")
    parser.add_argument("--rows", default="", metavar="REGEX", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--calls", type=int, default=500, help="calls of each row in a round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="the table shows the median of them (%(default)s)")
    parser.add_argument("--instructions", choices=counters, nargs="?", const=next(iter(counters), None))
    parser.add_argument("--keep", type=Path, help="an empty directory to keep callgrind's profiles in")
    parser.add_argument(
        "--inside", metavar="REGEX", help="also count the instructions of these functions; callgrind only"
    )
    parser.add_argument(
        "--where", choices=("allocations", "mutexes", "copied_bytes"), help="show places, not the table"
    )
    parser.add_argument("--depth", type=int, default=6, help="frames of each place, with --where (%(default)s)")
    parser.add_argument("--side", choices=SIDES, default="caller", help="with --where (%(default)s)")
    parser.add_argument("--write", action="store_true", help="keep the counts of torchrpc")
    parser.add_argument(
        "--table", type=Path, default=KEPT, help="the kept counts; a .md beside it shows them (%(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write the counts of the last system to this file")
    arguments = parser.parse_args()
    if arguments.inside and arguments.instructions != Callgrind.name:
        parser.error("--inside needs --instructions callgrind")
    transports = arguments.transports.split(",")
    if arguments.where:
        for transport in transports:
            rows = [row for row in ROWS if re.search(arguments.rows, row)]
            show_places(transport, rows, arguments.calls, arguments.where, arguments.depth, arguments.side)
        return
    for system in arguments.systems.split(","):
        rows = [row for row in rows_of(system) if re.search(arguments.rows, row)]
        costs: Costs = {t: measure(system, t, rows, arguments.calls, arguments.rounds) for t in transports}
        if arguments.instructions:
            for transport in transports:
                counts = {}
                for in_cpp, chosen in by_language(rows):
                    with tempfile.TemporaryDirectory() as temporary:
                        language = "cpp" if in_cpp else "python"
                        directory = (arguments.keep or Path(temporary)) / system / transport / language
                        directory.mkdir(parents=True)
                        counter = counters[arguments.instructions](directory)
                        counts |= count_instructions(
                            system, transport, chosen, min(arguments.calls, 300), counter, arguments.inside
                        )
                for row, sides in counts.items():
                    for side, more in sides.items():
                        costs[transport][row][side].update(more)
                        if arguments.inside:
                            print(f"{system}, {transport}, {ROWS[row]}, {side}: {more['inside']:,} inside")
        print(table(costs, "" if system == "torchrpc" else f", {system}"))
        if arguments.json:
            arguments.json.write_text(json.dumps(costs, indent=1) + "\n")
    if arguments.write:
        write(costs, arguments.table)
    elif KNOWN[system] == KNOWN["torchrpc"]:
        kept = json.loads(arguments.table.read_text())["costs"]
        found = list(grown(kept, costs))
        for _ in range(2):  # a row counts as grown only if new processes agree
            again = {t: [row for row in ROWS if (t, row) in {each[:2] for each in found}] for t in transports}
            again = {t: rows for t, rows in again.items() if rows}
            costs = {t: measure(system, t, rows, arguments.calls, arguments.rounds) for t, rows in again.items()}
            found = list(grown(kept, costs))
        for *_, text in found:
            print(text)
        sys.exit(bool(found))


def write(costs: Costs, path: Path) -> None:
    kept = json.loads(path.read_text())["costs"] if path.exists() else {}
    for transport, rows in costs.items():
        for row, sides in rows.items():
            for side, counts in sides.items():
                old = kept.setdefault(transport, {}).setdefault(row, {}).get(side, {})
                # Instructions that were not counted this time stay.
                kept[transport][row][side] = {**{k: v for k, v in old.items() if "instructions" in k}, **counts}
    versions = {"python": platform.python_version(), "torch": version("torch"), "machine": platform.machine()}
    path.write_text(json.dumps({"versions": versions, "costs": kept}, indent=1, sort_keys=True) + "\n")
    ordered = {transport: {row: kept[transport][row] for row in ROWS if row in kept[transport]} for transport in kept}
    path.with_suffix(".md").write_text(INTRODUCTION.format(**versions) + table(ordered))


INTRODUCTION = """\
# What a call costs

`python benchmarks/costs --write --instructions` has written this page and `costs.json`. Cells show caller / callee: the
counts of torchrpc's own code, and in brackets those of the whole process, with Python and torch. Copied bytes are those
of calls of `memcpy` and `memmove`. Python {python}, torch {torch}, {machine}.

"""

if __name__ == "__main__":
    main()
