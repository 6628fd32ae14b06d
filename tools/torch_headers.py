#!/usr/bin/env python3
"""Compiles csrc against the headers of the oldest and the newest supported release of torch (make headers).

A wheel of torch with CUDA has more than 500 MB, 10 of them headers. The program asks uv where the wheel is, reads the
headers alone, by HTTP range requests, and keeps them in .venv/torch_headers. Nothing is linked or run: `make matrix`
finds symbols that torch no longer exports, and changes of its behaviour.
"""

import argparse
import io
import json
import re
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

from torch_environments import ROOT, SUPPORTED, run

HEADERS = ROOT / ".venv/torch_headers"
BUILD = ROOT / "build/headers"
# Each layer is one group, without optimisation: nothing of it is used. clang needs half of the time of g++.
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "CMAKE_CXX_COMPILER": "clang++-19",
    "CMAKE_CXX_FLAGS_RELEASE": "-O0 -DNDEBUG",
    "TORCHRPC_ALLOW_ANY_TORCH": "ON",
    "TORCHRPC_BUILD_TESTS": "OFF",
    "TORCHRPC_GROUP_KILOBYTES": "1000",
}


class RemoteFile(io.RawIOBase):
    """A file on an HTTP server that is read by range requests."""

    def __init__(self, url: str, size: int):
        self._url, self._size, self._position = url, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = (0, self._position, self._size)[whence] + offset
        return self._position

    def readinto(self, buffer) -> int:
        end = min(self._size, self._position + len(buffer))
        if end <= self._position:
            return 0
        request = urllib.request.Request(self._url, headers={"Range": f"bytes={self._position}-{end - 1}"})
        with urllib.request.urlopen(request) as response:
            if response.status != 206:
                raise SystemExit(f"the server of {self._url} sends whole files only: it knows no range requests")
            data = response.read()
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def headers(release: str) -> Path:
    """Return the folder with torch's include/ and version.py of this release; read them first if it is missing."""
    folder = HEADERS / release
    if not (folder / "torch/version.py").exists():
        # Without --python, uv would run the interpreters on PATH until one has this version.
        ask = ("uv", "pip", "compile", "--quiet", "--python", sys.executable, "--no-deps", "--only-binary=torch", "-")
        platform = ("--python-version=3.12", "--python-platform=x86_64-manylinux_2_28", "--format=pylock.toml")
        found = run(*ask, *platform, input=f"torch=={release}.*", stdout=subprocess.PIPE).stdout
        url, size = re.search(r'url = "([^"]+)".* size = (\d+)', found).groups()
        with zipfile.ZipFile(io.BufferedReader(RemoteFile(url, int(size)), 4 << 20)) as wheel:
            names = [name for name in wheel.namelist() if name.startswith("torch/include/")]
            wheel.extractall(folder, [*names, "torch/version.py"])  # the last one says that all are there
    return folder / "torch"


def compile_sources(release: str) -> bool:
    """Compile all sources against this release; return whether that succeeded."""
    build = BUILD / f"torch{release}"
    options = (f"-D{name}={value}" for name, value in {**OPTIONS, "LibTorch_DIR": headers(release)}.items())
    run("cmake", "-S", ROOT, "-B", build, "-G", "Ninja", *options)
    commands = json.loads((build / "compile_commands.json").read_text())
    objects = [(build / command["output"]).relative_to(build) for command in commands]
    return run("cmake", "--build", build, "--target", *objects, "--", "-k", "0", check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="*", default=[SUPPORTED[0], SUPPORTED[-1]], metavar="X.Y")
    failed = [release for release in parser.parse_args().torch if not compile_sources(release)]
    for release in failed:
        print(f"csrc does not compile against torch {release}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
