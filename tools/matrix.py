#!/usr/bin/env python3
"""Tries the wheels in dist with each release of torch and each Python, and prints a table (also build/matrix.md).

A cell is an environment with one Python and one release of torch. The wheel of this Python is installed there, then the
smoke tests run (a part of tests/python), and, in the cells that --conformance names, torch's own RPC suite. If there is
no wheel for a Python, tools/wheels.py builds it first.

--torch may name a release that is not supported yet, also a prerelease: the program builds a wheel for this release
alone, and the table shows what breaks.
"""

import argparse
import re
import sys
import time
from pathlib import Path
from typing import NamedTuple

from torch_environments import PYTHONS, ROOT, SUPPORTED, environment, environment_variables, interpreter, run

# Tests of what differs between releases: names that are replaced, nodes of graphs, kernels, pickles, the interpreter's
# own.
SMOKE = "autograd_api calls distributed_optimizer optim_kernels pickler remote_module rrefs script surface"
TEST_PACKAGES = ("pytest", "pytest-timeout", "pytest-xdist", "expecttest", "hypothesis", "cloudpickle", "packaging")
NOT_HERE = "not on this machine"


class Cell(NamedTuple):
    torch: str
    python: str
    built: str
    smoke: str = ""
    conformance: str = ""
    seconds: float = 0

    @property
    def failed(self) -> bool:
        return "failed" in self.built + self.smoke + self.conformance


def summary(output: Path, pattern: str, status: int) -> str:
    """Return the last line in the file that the pattern matches, and "failed" if the exit status is not 0."""
    found = re.findall(pattern, output.read_text(errors="replace"))
    text = found[-1] if found else "no result"
    return text if "failed" in text or (found and status == 0) else f"{text} (failed)"


def try_cell(torch: str, python: str, wheel: Path | None, conformance: bool) -> Cell:
    start = time.monotonic()
    if (env := environment(python, torch)) is None:
        return Cell(torch, python, "no torch for it")
    if wheel is None:
        return Cell(torch, python, "failed: no wheel")
    install = ("uv", "pip", "install", "--quiet", "--python", env / "bin/python")
    run(*install, *TEST_PACKAGES)
    run(*install, "--reinstall", "--no-deps", wheel)
    variables = environment_variables(env)
    version = run(env / "bin/python", "-m", "torchrpc", "--version", env=variables, check=False)
    if version.returncode != 0:
        return Cell(torch, python, "failed: import")
    logs = ROOT / "build/matrix"
    logs.mkdir(parents=True, exist_ok=True)

    def logged(name: str, pattern: str, *command: object) -> str:
        log = logs / f"{env.name}-{name}.log"
        with log.open("w") as file:
            status = run(*command, check=False, stdout=file, stderr=file, env=variables, cwd=ROOT).returncode
        return summary(log, pattern, status)

    tests = [ROOT / f"tests/python/test_{name}.py" for name in SMOKE.split()]
    smoke = logged(
        "smoke", r"(?m)^(\d+ (?:passed|failed|error).*) in ", env / "bin/python", "-m", "pytest", "-q", *tests
    )
    if conformance:
        suite = logged("conformance", r"(?m)^(\d+ passed, .*)$", env / "bin/python", ROOT / "tests/conformance/run.py")
        suite = suite.replace("0 FAILED", "0 ended badly").replace("FAILED", "failed")
    else:
        suite = ""
    return Cell(torch, python, "yes", smoke, suite, time.monotonic() - start)


def find_wheel(python: str, torch: str, folder: Path) -> Path | None:
    """Return the wheel for this Python; build it if it is missing. None if the build fails."""
    build = [ROOT / "tools/wheels.py", "--no-check", "--python", python]
    if torch not in SUPPORTED:
        folder = ROOT / f"build/matrix/torch{torch}"
        build += ["--torch", torch]
    pattern = f"torchrpc-*-cp{python.replace('.', '')}-*.whl"
    if not list(folder.glob(pattern)):
        run(sys.executable, *build, "--output", folder, check=False)
    return next(iter(folder.glob(pattern)), None)


def table(cells: list[Cell]) -> str:
    lines = ["| torch | Python | built | smoke tests | torch's suite | s |", "|-|-|-|-|-|-|"]
    lines += [f"| {c.torch} | {c.python} | {c.built} | {c.smoke} | {c.conformance} | {c.seconds:.0f} |" for c in cells]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="*", default=[], metavar="X.Y", help="default: all that this machine has")
    parser.add_argument("--torch", nargs="*", default=[], metavar="X.Y", help="default: all that are supported")
    parser.add_argument(
        "--conformance",
        nargs="*",
        default=["2.11-3.11", "2.13-3.11", "2.15-3.12"],
        metavar="TORCH-PYTHON",
        help="cells in which torch's suite runs (5 minutes each; default: 2.11-3.11 2.13-3.11 2.15-3.12)",
    )
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist", help="default: dist")
    arguments = parser.parse_args()
    releases, cells = arguments.torch or list(SUPPORTED), []
    for python in arguments.python or PYTHONS:
        if not interpreter(python):
            cells.append(Cell("all", python, NOT_HERE))
            continue
        for torch in releases:
            wheel = find_wheel(python, torch, arguments.wheels)
            cells.append(try_cell(torch, python, wheel, f"{torch}-{python}" in arguments.conformance))
            print(table(cells[-1:]).splitlines()[-1], flush=True)
    text = table(cells)
    (ROOT / "build/matrix.md").write_text(text)
    print(f"\n{text}", end="")
    return any(cell.failed for cell in cells)


if __name__ == "__main__":
    sys.exit(main())
