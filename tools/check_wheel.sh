#!/usr/bin/env bash
# Tries a wheel as its users would: in an environment and a folder of its own. Usage: tools/check_wheel.sh WHEEL
set -euo pipefail
wheel=$(realpath "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
unset PYTHONPATH TORCHRPC_REPLACE
say() { printf '\n== %s\n' "$*"; }

say "What is in it"
python3 - "$wheel" <<'END'
import sys, zipfile
names = zipfile.ZipFile(sys.argv[1]).namelist()
for wanted in ("torchrpc/lib/libtorchrpc.so", "torchrpc/_C.pyi", "torchrpc/rpc/__init__.pyi", "torchrpc/py.typed",
               "torchrpc/include/torchrpc/node.h", "torchrpc/share/cmake/torchrpc/torchrpcConfig.cmake"):
    assert wanted in names, f"{wanted} is missing"
assert any(name.startswith("torchrpc/_C.") and name.endswith(".so") for name in names), "no extension"
assert not [name for name in names if name.startswith(("tests/", "build/"))], "too much"
print(*names, sep="\n")
END

say "Installing it, with the torch that it asks for"
"${PYTHON:-python3}" -m venv env
# The exact release: a range would let pip fetch a build with CUDA where there is a smaller one.
env/bin/pip install --quiet torch==2.13.0
env/bin/pip install --quiet "$wheel"
env/bin/pip check

say "What the doctor says"
env/bin/python -m torchrpc doctor

say "A script for torch.distributed.rpc, and its child"
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
MASTER_ADDR=localhost MASTER_PORT=$((20000 + RANDOM % 10000)) env/bin/python -m torchrpc script.py

say "A C++ program against it"
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
cmake -S . -B cpp -DCMAKE_PREFIX_PATH="$(env/bin/python -c 'import torchrpc; print(torchrpc.cmake_prefix_path)')" >/dev/null
cmake --build cpp
[ "$(cpp/example "file://$folder/store")" = 3 ]

say "The wheel works"
