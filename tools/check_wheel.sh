#!/usr/bin/env bash
# Tries a wheel as its users would, with each release of torch that it has binaries for: in a fresh environment, without
# a compiler. Usage: tools/check_wheel.sh WHEEL [PYTHON [RELEASE...]]: only these releases of torch.
set -euo pipefail
wheel=$(realpath "$1")
python=$(command -v "${2:-python3}")
uv=$(command -v uv) cmake=$(command -v cmake)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
unset PYTHONPATH TORCHRPC_REPLACE VIRTUAL_ENV
say() { printf '\n== %s\n' "$*"; }

say "What is in $(basename "$wheel")"
python3 - "$wheel" <<'END' >releases
import re, sys, zipfile
names = zipfile.ZipFile(sys.argv[1]).namelist()
releases = sorted({match[1] for name in names if (match := re.match(r"torchrpc/_built/torch([\d.]+)/", name))},
                  key=lambda text: [int(number) for number in text.split(".")])
assert releases, "no binaries"
libraries = [name for name in names if re.search(r"/lib/libtorchrpc\.so", name)]
assert len(libraries) == len(releases), f"the library should be there once for each torch: {libraries}"
for wanted in ("include/torchrpc/node.h", "include/torchrpc/struct.h", "share/cmake/torchrpc/torchrpcConfig.cmake", "lib/pkgconfig/torchrpc.pc"):
    for release in releases:
        assert f"torchrpc/_built/torch{release}/{wanted}" in names, f"{wanted} is missing for torch {release}"
for release in releases:
    extensions = [name for name in names if re.fullmatch(rf"torchrpc/_built/torch{release}/_C\..*\.so", name)]
    assert len(extensions) == 1, extensions
for wanted in ("torchrpc/_C.pyi", "torchrpc/rpc/__init__.pyi", "torchrpc/py.typed"):
    assert wanted in names, f"{wanted} is missing"
assert not [name for name in names if name.startswith(("tests/", "build/"))], "too much"
assert not [name for name in names if ".libs/" in name], "a library of the build machine is in it"
print(*names, sep="\n", file=sys.stderr)
print(*releases)
END

cat > script.py <<'END'
import torch, torch.multiprocessing as mp
import torch.distributed.rpc as rpc

def run(rank):
    assert rpc.rpc_sync.__module__.startswith("torchrpc")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        print(rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3)))
    rpc.shutdown()

if __name__ == "__main__":
    mp.spawn(run, nprocs=2)
END
cat > CMakeLists.txt <<'END'
cmake_minimum_required(VERSION 3.25)
project(example LANGUAGES CXX)
find_package(torchrpc REQUIRED)
add_executable(example example.cpp)
target_link_libraries(example PRIVATE torchrpc::torchrpc)
END
cat > example.cpp <<'END'
#include <ATen/ATen.h>
#include <torchrpc/node.h>

#include <cstdio>

int main(int, char** argv) {
  torchrpc::Node node({.name = "alone", .rank = 0, .world_size = 1, .rendezvous = argv[1]});
  std::printf("%g\n", node.call<at::Tensor>("alone", torchrpc::op("aten::add"), at::ones({}), 2).item<double>());
  node.shutdown();
}
END

[ $# -lt 3 ] || echo "${@:3}" >releases
for release in $(cat releases); do
  say "torch $release: a fresh environment"
  rm -rf env cpp
  "$uv" venv --quiet --seed --python "$python" env
  "$uv" pip install --quiet --python env/bin/python "torch==$release.*" numpy
  start=$(date +%s.%N)
  # Without the configuration of this machine's pip, which may limit the releases of torch.
  env -i PATH="$folder/env/bin" HOME="$folder" PIP_CONFIG_FILE=/dev/null env/bin/pip install --quiet --no-index "$wheel"
  say "torch $release: a script for torch.distributed.rpc, and its child, without a compiler on PATH"
  env -i PATH="$folder/env/bin" MASTER_ADDR=localhost MASTER_PORT=0 HOME="$folder" env/bin/python -c "
import os, socket, sys
with socket.socket() as probe:
    probe.bind(('localhost', 0))
    os.environ['MASTER_PORT'] = str(probe.getsockname()[1])
os.execv(sys.executable, [sys.executable, '-m', 'torchrpc', 'script.py'])"
  echo "torch $release: from pip install to the end of the first program: $(python3 -c "
import time; print(f'{time.time() - $start:.1f} s')")"
  say "torch $release: the doctor"
  env -i PATH="$folder/env/bin" HOME="$folder" env/bin/python -m torchrpc doctor
  say "torch $release: a C++ program"
  prefix=$(env/bin/python -c 'import torchrpc; print(torchrpc.cmake_prefix_path)')
  "$cmake" -S . -B cpp -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
  "$cmake" --build cpp
  rm -f store
  [ "$(cpp/example "file://$folder/store")" = 3 ]
done

say "The wheel works with torch $(cat releases)"
