"""Builds the wheel and the editable install with the one CMake build; all else is in pyproject.toml.

Environment: TORCHRPC_BUILD_DIR (default: build/pip), TORCHRPC_CMAKE_ARGS (more arguments for the configuring; they
win over the ones here), CMAKE_BUILD_PARALLEL_LEVEL. TORCHRPC_BINARIES names a folder of binaries that are built already
(torch2.13/, torch2.15/, ...): the wheel holds these, and nothing is compiled (tools/wheels.py).
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
BINARIES = os.environ.get("TORCHRPC_BINARIES", "")


def version() -> str:
    found = re.search(r"^project\(torchrpc VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE)
    assert found, "CMakeLists.txt names no version"
    return found.group(1)


def minor(release: str) -> int:
    return int(release.removeprefix("2."))


def torch_requirement() -> str:
    """A wheel needs a release of torch that it has binaries for; an sdist any that is supported."""
    text = (ROOT / "python/torchrpc/_torch_versions.py").read_text()
    supported = re.findall(r"\d+\.\d+", next(line for line in text.splitlines() if line.startswith("SUPPORTED")))
    releases = supported
    if "sdist" in sys.argv:
        pass
    elif BINARIES:
        releases = sorted((path.name.removeprefix("torch") for path in Path(BINARIES).iterdir()), key=minor)
    else:
        with contextlib.suppress(metadata.PackageNotFoundError):  # the build says what to do
            releases = [".".join(metadata.version("torch").split(".")[:2])]
    if len(releases) == 1:
        return f"torch=={releases[0]}.*"
    first, last = minor(releases[0]), minor(releases[-1])
    holes = [f"!=2.{number}.*" for number in range(first, last) if f"2.{number}" not in releases]
    return "torch" + ",".join([f">={releases[0]}", f"<2.{last + 1}", *holes])


def require_torch() -> None:
    """Says what to do where torch is missing: most often pip has hidden it in a build environment of its own."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # a torchrpc that is installed already may not fit this torch
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise SystemExit(
            f"torchrpc is built against the torch that is installed, and {sys.executable} has none ({error}).\n"
            "Run: pip install torch==2.13.0 'setuptools>=77' cmake ninja && pip install --no-build-isolation torchrpc\n"
            "(for a source tree: pip install --no-build-isolation .)"
        ) from error


class CMakeBuild(build_ext):
    """Builds with CMake and installs into the package: the source tree's for an editable install."""

    def run(self) -> None:
        in_place = self.inplace or self.editable_mode
        package = (ROOT / "python" if in_place else Path(self.build_lib).resolve()) / "torchrpc"
        if not in_place:
            shutil.rmtree(package / "_built", ignore_errors=True)  # of an earlier build
        if BINARIES:
            shutil.copytree(BINARIES, package / "_built", dirs_exist_ok=True)
            return
        require_torch()
        build = ROOT / os.environ.get("TORCHRPC_BUILD_DIR", "build/pip")
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "Python_EXECUTABLE": sys.executable,
            "TORCHRPC_BUILD_TESTS": "OFF",
            "TORCHRPC_BUILD_BENCHMARKS": "OFF",
        }
        defines = [f"-D{name}={value}" for name, value in options.items()]
        more = shlex.split(os.environ.get("TORCHRPC_CMAKE_ARGS", ""))
        subprocess.run(["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", *defines, *more], check=True)
        subprocess.run(["cmake", "--build", build, "--target", "torchrpc_package"], check=True)
        subprocess.run(["cmake", "--install", build, "--prefix", package, "--component", "python"], check=True)


setup(
    version=version(),
    install_requires=[torch_requirement()],
    ext_modules=[Extension("torchrpc._C", [])],
    cmdclass={"build_ext": CMakeBuild},
)
