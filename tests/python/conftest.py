"""Fixtures of all Python tests."""

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # a thread pool does not survive the forks of some tests
os.environ.pop("TORCHRPC_REPLACE", None)


@pytest.fixture(scope="session")
def hook_path(tmp_path_factory):
    """Environment variables with which `import torch` finds torchrpc's hook, also if the package is not installed."""
    source = str(Path(__file__).parents[2] / "python")
    path = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    if not any(hook.value.startswith("torchrpc.") for hook in metadata.entry_points(group="torch.backends")):
        site = tmp_path_factory.mktemp("site")
        info = site / "torchrpc-0.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchrpc\nVersion: 0.0\n")
        (info / "entry_points.txt").write_text("[torch.backends]\ntorchrpc = torchrpc._autoload:autoload\n")
        path.insert(0, str(site))
    else:
        path = path[1:]  # the package is installed
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def run_python(hook_path, tmp_path):
    """Runs a Python program in a child process; returns the completed process."""
    import subprocess

    def run(*command, env=None, check=True):
        result = subprocess.run(
            [sys.executable, *map(str, command)],
            env={**hook_path, **(env or {})},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
        )
        if check:
            assert result.returncode == 0, result.stdout + result.stderr
        return result

    return run


@pytest.fixture(scope="session")
def mixed_worker():
    """The program of C++ workers of mixed groups. The variable names another build of it."""
    built = Path(__file__).parents[2] / "build/release/tests/cpp/mixed_worker"
    path = Path(os.environ.get("TORCHRPC_MIXED_WORKER", built)).resolve()
    if not path.exists():
        pytest.skip(f"{path} is not built: `make test` does it")
    return path
