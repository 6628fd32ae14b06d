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
from packaging.requirements import Requirement

import torchrpc
from torchrpc._torch_versions import SUPPORTED

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


RELEASE = ".".join(torch.__version__.split(".")[:2])
BUILT = list(torchrpc._binaries())


def test_pip_requires_a_torch_that_the_package_has_binaries_for():
    assert RELEASE in BUILT and set(BUILT) <= set(SUPPORTED)
    wanted = next(line for line in metadata.requires("torchrpc") if line.startswith("torch"))
    for release in (*SUPPORTED, "2.10", "2.16"):
        assert Requirement(wanted).specifier.contains(f"{release}.1") == (release in BUILT), (wanted, release)


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


LISTED = " and ".join(filter(None, [", ".join(BUILT[:-1]), BUILT[-1]]))
TOLD = f"This torchrpc is built for torch {LISTED}, but this environment has torch"
REMEDIES = dict.fromkeys(
    ("2.10.0", "2.16.0", "2.16.0.dev20261101+cpu"),
    f"another torchrpc: this version supports torch {SUPPORTED[0]} to {SUPPORTED[-1]}.",
)
for missing in set(SUPPORTED) - set(BUILT):
    REMEDIES[f"{missing}.1"] = "build torchrpc for this one (pip install --no-build-isolation"
OTHER = "2.10.0"


@pytest.mark.parametrize("program", ["import torchrpc", "import torchrpc.rpc", "import torch; import torchrpc"])
def test_another_torch_is_an_error_at_import(run_with_torch, program):
    for version, remedy in REMEDIES.items():
        code, text = run_with_torch(version, program)
        assert code == 1
        assert f"ImportError: {TOLD} {version}. Install a torch that fits (pip install 'torch=={BUILT[-1]}.*')" in text
        assert remedy in text


def test_another_torch_can_be_imported_itself(run_with_torch):
    assert run_with_torch(OTHER, "import torch") == (0, "")


def test_replacing_the_rpc_of_another_torch_is_an_error(run_with_torch):
    code, text = run_with_torch(OTHER, "import torch", TORCHRPC_REPLACE="1")
    assert code == 1 and f"RuntimeError: {TOLD} {OTHER}" in text


@pytest.mark.parametrize("version", [f"{RELEASE}.0", f"{RELEASE}.1+cpu", f"{RELEASE}.0a0+git1234"])
def test_any_build_of_the_right_release_is_accepted(run_with_torch, version):
    assert run_with_torch(version, "import torch; import torchrpc") == (0, "")


COPY = """
import shutil, sys
from pathlib import Path
import torchrpc
package = Path(sys.argv[1]) / "torchrpc"
shutil.copytree(torchrpc.__path__[0], package, ignore=shutil.ignore_patterns("*.so", "__pycache__", "_built"))
for release in sys.argv[2:]:
    (package / f"_built/torch{release}").mkdir(parents=True)
    (package / f"_built/torch{release}/_C.py").write_text(f"RELEASE = {release!r}")
"""


def test_the_binaries_for_the_installed_torch_are_chosen(run_with_torch, tmp_path):
    subprocess.run([sys.executable, "-c", COPY, tmp_path, "2.11", "2.9", "2.13"], check=True)
    for version, chosen in {"2.11.0": "2.11", "2.13.0+cu130": "2.13", "2.9.1": "2.9"}.items():
        for start in ("", "import torch; "):
            program = f"{start}import torchrpc._C as c; assert c.RELEASE == {chosen!r}; import torchrpc; "
            program += f"assert torchrpc.cmake_prefix_path.endswith('torch{chosen}')"
            assert run_with_torch(version, program) == (0, "")
    code, text = run_with_torch("2.12.0", "import torchrpc")
    assert code == 1 and "built for torch 2.9, 2.11 and 2.13, but this environment has torch 2.12.0" in text
    shutil.rmtree(tmp_path / "torchrpc")


# --- The wheels ---

SETUP = """
import runpy, setuptools, sys
setuptools.setup = lambda **options: print(options["install_requires"][0])
sys.argv[1:] = [sys.argv[1]]
runpy.run_path("setup.py")
"""


@pytest.mark.parametrize(
    "releases, requirement",
    [
        (SUPPORTED, f"torch>={SUPPORTED[0]},<2.{int(SUPPORTED[-1].split('.')[1]) + 1}"),
        (("2.11", "2.13", "2.14"), "torch>=2.11,<2.15,!=2.12.*"),
        (("2.13",), "torch==2.13.*"),
    ],
)
def test_a_wheel_requires_a_torch_that_it_has_binaries_for(tmp_path, releases, requirement):
    for release in releases:
        (tmp_path / f"torch{release}").mkdir()
    env = {**os.environ, "TORCHRPC_BINARIES": str(tmp_path)}
    wheel = subprocess.run(
        [sys.executable, "-c", SETUP, "bdist_wheel"], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert wheel.stdout.strip() == requirement


# --- The sdist ---

NOT_SHIPPED = {".ci", ".gitignore", ".pre-commit-config.yaml", "PKG-INFO", "setup.cfg"}


def tracked_files():
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("git says which files are source: this is not a checkout, or git is not installed")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:  # the checkout belongs to another user
        pytest.skip(f"git says which files are source, but does not list them: {listed.stderr.strip()}")
    return listed.stdout.split("\0")[:-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The files that git tracks, and the names in an sdist made of them. A checkout may have other files, too."""
    copy, out = tmp_path_factory.mktemp("source") / "torchrpc", tmp_path_factory.mktemp("dist")
    source = {name for name in tracked_files() if (ROOT / name).exists()}
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
