#!/usr/bin/env bash
# Runs tests/cpp/public/every_class, which uses every public class, under a sanitizer as a user would: installs the library
# of the preset's build into a folder outside of the tree, builds the program there with find_package(torchrpc), and runs
# it. Fails on any report. Usage: tools/public_sanitizers.sh asan|tsan...
set -euo pipefail
cd "$(dirname "$0")/.."
tree=$PWD
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python=${PYTHON:-$tree/.venv/bin/python}
compiler=clang++-19
launcher=()
if command -v ccache >/dev/null; then launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi

for preset in "$@"; do
  case $preset in
    asan) flags=-fsanitize=address,undefined ;;
    tsan) flags=-fsanitize=thread ;;
    *) echo "usage: $0 asan|tsan..." >&2; exit 2 ;;
  esac
  prefix=$place/$preset
  cmake --install "build/$preset" --component core --prefix "$prefix" >"$place/log"
  torch=$("$python" -c "import importlib.util; print(importlib.util.find_spec('torch').submodule_search_locations[0])")
  cp -r tests/cpp/public/every_class "$place/source.$preset"
  # The checks of the library's build (CMakeLists.txt), of which -fno-sanitize=vptr is necessary: LibTorch has no type information
  # of our classes.
  cmake -S "$place/source.$preset" -B "$prefix/build" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" -Dtorchrpc_TORCH_DIR="$torch" \
    -DCMAKE_CXX_COMPILER=$compiler "${launcher[@]}" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" \
    -DCMAKE_CXX_FLAGS="$flags -fno-sanitize=vptr -fno-sanitize-recover=all -fno-omit-frame-pointer" >"$place/log" \
    || { cat "$place/log"; exit 1; }
  cmake --build "$prefix/build" >"$place/log" || { cat "$place/log"; exit 1; }
  echo "every_class under $preset:"
  # A report of any sanitizer ends the program with another code than 0.
  OMP_NUM_THREADS=1 \
    ASAN_OPTIONS=allocator_may_return_null=1:strict_string_checks=1:detect_stack_use_after_return=1 \
    UBSAN_OPTIONS=print_stacktrace=1 \
    TSAN_OPTIONS=allocator_may_return_null=1:suppressions=$tree/tests/tsan.supp:second_deadlock_stack=1 \
    timeout 600 "$prefix/build/every_class"
done
