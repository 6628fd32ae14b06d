"""Virtual environments with one release of torch each, for tools/wheels.py and tools/matrix.py.

uv makes them in build/environments: environments with the same release of torch share its files. The interpreters
are those that uv finds (on PATH, of pyenv with PYENV_VERSION, or installed by uv itself).
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUPPORTED = runpy.run_path(str(ROOT / "python/torchrpc/_torch_versions.py"))["SUPPORTED"]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.14t")
ENVIRONMENTS = ROOT / "build/environments"


def run(*command: object, check: bool = True, **options) -> subprocess.CompletedProcess:
    """Run the command, by default with its output on standard error; raise if it fails, unless `check` is false."""
    options.setdefault("stdout", sys.stderr)
    print("+", *command, file=sys.stderr, flush=True)
    return subprocess.run([str(word) for word in command], check=check, text=True, **options)


def interpreter(python: str) -> str:
    """Return the path of this version of Python ("3.14t": free-threaded); an empty string if there is none."""
    found = subprocess.run(
        ["uv", "python", "find", "--system", "--no-project", "--no-python-downloads", python],
        capture_output=True,
        text=True,
    )
    return found.stdout.strip()


def environment(python: str, torch: str) -> Path | None:
    """Return the environment with this Python and this release of torch; None if torch has no wheel for it.

    A release that is not supported yet may be a prerelease.
    """
    folder = ENVIRONMENTS / f"cp{python.replace('.', '')}-torch{torch}"
    if (folder / "ready").exists():
        return folder
    run("uv", "venv", "--quiet", "--clear", "--python", interpreter(python), folder)
    not_needed = folder / "not_needed.txt"  # 1 GB each, for torch.compile and CUDA's Python API
    not_needed.write_text("triton; sys_platform == 'none'\ncuda-bindings; sys_platform == 'none'\n")
    install = ("uv", "pip", "install", "--quiet", "--only-binary=torch", "--python", folder / "bin/python")
    packages = [f"torch=={torch}.*", "numpy", "setuptools>=77"]
    if torch not in SUPPORTED:
        packages.append("--prerelease=allow")
    if run(*install, "--overrides", not_needed, *packages, check=False).returncode != 0:
        return None
    (folder / "ready").touch()
    return folder


def environment_variables(folder: Path) -> dict[str, str]:
    """Return the variables for programs that run in this environment."""
    dropped = ("PYTHONPATH", "VIRTUAL_ENV", "TORCHRPC_REPLACE")
    variables = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**variables, "PATH": f"{folder}/bin:{variables['PATH']}"}
