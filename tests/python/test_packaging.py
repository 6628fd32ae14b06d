"""The package's metadata, its errors with another torch, and its sdist."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest
import tomllib
import torch

import torchrpc
from torchrpc._torch_versions import SUPPORTED

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


BUILT = torchrpc._built_for()


def test_pip_requires_the_torch_that_the_extension_is_built_for():
    assert BUILT in SUPPORTED and torch.__version__.startswith(BUILT + ".")
    assert f"torch=={BUILT}.*" in metadata.requires("torchrpc")


def test_the_supported_releases_are_in_one_place():
    for page in ("README.md", "docs/quickstart.md", "docs/versions.md"):
        assert f"torch {SUPPORTED[0]} to {SUPPORTED[-1]}" in (ROOT / page).read_text(), page


def test_the_version_is_in_one_place():
    stated = re.search(r"^project\(torchrpc VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text(), re.M)[1]
    assert "version" in PYPROJECT["project"]["dynamic"] and "version" not in PYPROJECT["project"]
    assert stated not in (ROOT / "pyproject.toml").read_text()
    assert re.search(rf"^## {re.escape(stated)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


# --- Another torch: a stand-in that imports as torch does, hooks included ---

FAKE_TORCH = """
__version__ = "{version}"
class _C:
    _rpc_init = None
from importlib.metadata import entry_points
for hook in entry_points(group="torch.backends"):
    hook.load()()
"""


@pytest.fixture
def run_with_torch(hook_path, tmp_path):
    """Runs a program with a fake torch of that version; returns exit code and stderr."""

    def run(version, program, **env):
        package, info = tmp_path / "torch", tmp_path / f"torch-{version}.dist-info"
        for folder in (package, *tmp_path.glob("torch-*.dist-info")):
            shutil.rmtree(folder, ignore_errors=True)
        package.mkdir()
        info.mkdir()
        (package / "__init__.py").write_text(FAKE_TORCH.format(version=version))
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        path = os.pathsep.join(filter(None, [str(tmp_path), hook_path.get("PYTHONPATH")]))
        result = subprocess.run(
            [sys.executable, "-c", program],
            env={**hook_path, "PYTHONPATH": path, **env},
            capture_output=True,
            text=True,
            timeout=100,
        )
        return result.returncode, result.stderr

    return run


TOLD = f"This torchrpc is built for torch {BUILT}, but this environment has torch"
REMEDIES = {
    "2.10.0": f"another torchrpc: this one supports torch {SUPPORTED[0]} to {SUPPORTED[-1]}.",
    "2.99.1": f"another torchrpc: this one supports torch {SUPPORTED[0]} to {SUPPORTED[-1]}.",
    ("2.12.1" if BUILT != "2.12" else "2.13.0"): "build torchrpc again for this one (pip install --no-build-isolation",
}
OTHER = next(reversed(REMEDIES))


@pytest.mark.parametrize("program", ["import torchrpc", "import torchrpc.rpc", "import torch; import torchrpc"])
def test_another_torch_is_an_error_at_import(run_with_torch, program):
    for version, remedy in REMEDIES.items():
        code, text = run_with_torch(version, program)
        assert code == 1
        assert f"ImportError: {TOLD} {version}. Install the one that fits (pip install 'torch=={BUILT}.*')" in text
        assert remedy in text


def test_another_torch_can_be_imported_itself(run_with_torch):
    assert run_with_torch(OTHER, "import torch") == (0, "")


def test_replacing_the_rpc_of_another_torch_is_an_error(run_with_torch):
    code, text = run_with_torch(OTHER, "import torch", TORCHRPC_REPLACE="1")
    assert code == 1 and f"RuntimeError: {TOLD} {OTHER}" in text


@pytest.mark.parametrize("version", [f"{BUILT}.0", f"{BUILT}.1+cpu", f"{BUILT}.0a0+git1234"])
def test_any_build_of_the_right_release_is_accepted(run_with_torch, version):
    assert run_with_torch(version, "import torch; import torchrpc") == (0, "")


# --- The sdist ---

NOT_SHIPPED = {".ci", ".gitignore", ".pre-commit-config.yaml", "PKG-INFO", "setup.cfg"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The files that git does not ignore, and the names in an sdist made of them."""
    if not (ROOT / ".git").exists():
        pytest.skip("git says which files are source, and this is not a checkout")
    copy, out = tmp_path_factory.mktemp("source") / "torchrpc", tmp_path_factory.mktemp("dist")
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    source = {name for name in listed if name and (ROOT / name).exists()}
    for name in source:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    program = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    built = subprocess.run([sys.executable, "-c", program, out], cwd=copy, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    with tarfile.open(out / built.stdout.splitlines()[-1]) as archive:
        return source, {name.partition("/")[2] for name in archive.getnames()}


def test_the_sdist_has_every_file_of_the_source(sdist):
    source, names = sdist
    assert not {name for name in source - names if Path(name).parts[0] not in NOT_SHIPPED}


def test_the_sdist_has_nothing_that_was_built(sdist):
    _, names = sdist
    assert not [name for name in names if name.endswith((".so", ".pyc", ".o"))]
