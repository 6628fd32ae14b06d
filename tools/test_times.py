#!/usr/bin/env python3
"""Measures where the time of the tests goes. Writes tests/times.json and tests/TIMES.md.

Usage: tools/test_times.py [--jobs N] [--cpp] [--python [PYTEST_ARGUMENT ...]]

Needs what `make test` builds. Arguments of pytest may name some of the files; their rows alone are replaced then.
`make test` reads tests/times.json: it leaves the slow tests to `make check` and starts with what takes longest
(tests/python/conftest.py). A test that is not in the file counts as quick. Measure while nothing else runs.

What Python tests wait for is sampled: tools/test_times/test_times_plugin.py.
"""

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMES = ROOT / "tests/times.json"
TABLE = ROOT / "tests/TIMES.md"
NOTED_S = 0.5  # of quicker tests only the sum is in the file
SUMS = ("seconds", "cpu", "starts", "torch", "slept", "slept in children")
WAITS = ("child processes", "forming a group", "shutdown", "calls", "conditions", "other")


def measure_cpp(output: Path) -> None:
    listed = subprocess.run(
        ["ctest", "--preset", "release", "--show-only=json-v1"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for test in json.loads(listed.stdout)["tests"]:
        variables = {}
        for each in test.get("properties", []):
            if each["name"] == "ENVIRONMENT":
                variables = dict(entry.split("=", 1) for entry in each["value"])
        if "--durations" in test["command"]:  # a program of Catch2
            print("+", test["name"], file=sys.stderr, flush=True)
            environment = {**os.environ, **variables, "TORCHRPC_TEST_TIMES": str(output)}
            subprocess.run(test["command"][:1], env=environment, cwd=ROOT, stdout=sys.stderr, check=False)


def measure_python(output: Path, jobs: int, arguments: list[str]) -> None:
    environment = {
        **os.environ,
        "TORCHRPC_TEST_TIMES": str(output),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tools/test_times"), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = [sys.executable, "tools/run_tests.py", "-p", "test_times_plugin", "--jobs", str(jobs), *arguments]
    subprocess.run(command, env=environment, cwd=ROOT, stdout=sys.stderr, check=False)


def file_of(test: dict) -> str:
    return os.path.relpath(test["file"], ROOT) if "file" in test else test["id"].split("::")[0]


def cell(number: float) -> str:
    return str(number or "") if isinstance(number, int) else f"{number:.1f}" if number >= 0.05 else ""


def summary(tests: list[dict]) -> dict:
    """Return the row of one file."""
    waits = collections.Counter()
    for test in tests:
        waits.update(test.get("waits", {}))
    row = {"tests": len(tests), **{key: round(sum(test.get(key, 0) for test in tests), 2) for key in SUMS}}
    noted = {test["id"].split("::", 1)[-1]: test["seconds"] for test in tests if test["seconds"] >= NOTED_S}
    return {**row, "waits": {name: round(waits[name], 2) for name in WAITS if waits[name]}, "noted": noted}


def table(files: dict[str, dict]) -> str:
    """Return the tables of files, one for each language, those that take longest first."""

    def rows(suffix: str, keys: tuple[str, ...], waits: tuple[str, ...] = ()) -> list[str]:
        chosen = {file: row for file, row in files.items() if file.endswith(suffix)}
        total = summary([{"id": "", "seconds": 0, "waits": row["waits"]} for row in chosen.values()])
        total |= {key: sum(row[key] for row in chosen.values()) for key in ("tests", *SUMS)}
        longest_first = sorted(chosen.items(), key=lambda pair: -pair[1]["seconds"])
        return [
            f"| {file.removeprefix('tests/')} | "
            + " | ".join([*(cell(row[key]) for key in keys), *(cell(row["waits"].get(wait, 0)) for wait in waits)])
            + " |"
            for file, row in [("all", total), *longest_first]
        ]

    lines = [
        "# Where the time of the tests goes",
        "",
        "`tools/test_times.py` makes this page. Times are seconds; empty: less than 0.05.",
        "",
        "`processes`: Python processes started anew. `import torch`: the time of their imports. `sleeps`: in the main",
        "thread of the tests, and in their child processes. The other columns: what the main thread waited for.",
        "",
        "| Python file | tests | wall | processor | processes | import torch | sleeps | in children | "
        + " | ".join(WAITS)
        + " |",
        "|-" * (8 + len(WAITS)) + "|",
        *rows(".py", ("tests", *SUMS), WAITS),
        "",
        "| C++ file | tests | wall | processor | sleeps |",
        "|-|-|-|-|-|",
        *rows(".cpp", ("tests", "seconds", "cpu", "slept")),
        "",
        "| slowest tests | wall |",
        "|-|-|",
    ]
    noted = [(seconds, file, name) for file, row in files.items() for name, seconds in row["noted"].items()]
    for seconds, file, name in sorted(noted, reverse=True)[:40]:
        lines.append(f"| {file.removeprefix('tests/')}: {name} | {seconds:.1f} |".replace("||", "\\|\\|"))
    return re.sub(r"(\| )+\|$", lambda ends: re.sub(" +", " ", ends.group()), "\n".join(lines), flags=re.M) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="Python tests at the same time (default: 1)")
    parser.add_argument("--cpp", action="store_true", help="the C++ tests only")
    parser.add_argument("--python", action="store_true", help="the Python tests only")
    arguments, pytest_arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "times"
        output.touch()
        if not arguments.python:
            measure_cpp(output)
        if not arguments.cpp:
            measure_python(output, arguments.jobs, pytest_arguments)
        measured = [json.loads(line) for line in output.read_text().splitlines()]
    files = json.loads(TIMES.read_text()) if TIMES.exists() else {}
    tests = collections.defaultdict(list)
    for test in measured:
        tests[file_of(test)].append(test)
    files = {file: row for file, row in files.items() if (ROOT / file).exists()}
    files |= {file: summary(those) for file, those in tests.items()}
    TIMES.write_text(json.dumps(dict(sorted(files.items())), indent=1) + "\n")
    TABLE.write_text(table(files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
