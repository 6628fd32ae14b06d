#!/usr/bin/env bash
# Runs clang-tidy over csrc, with clang's own warnings and those of its thread-safety analysis (make tidy). An argument is
# a regular expression of the groups to look at: tools/tidy.sh transport. The headers of LibTorch are read precompiled.
set -euo pipefail
cd "$(dirname "$0")/.."
cmake --preset clang
ninja -C build/clang -t targets all | sed -n 's/: CXX_COMPILER__.*//p' | grep -E '^csrc/.*cmake_pch' |
  xargs cmake --build build/clang --target
python3 - "${1:-}" <<'PYTHON' |
import json, re, sys
files = [command["file"] for command in json.load(open("build/clang/compile_commands.json"))]
print(*(file for file in reversed(files) if re.search("/csrc/.*" + sys.argv[1], file) and "cmake_pch" not in file), sep="\n")
PYTHON
  xargs -P "$(nproc)" -n 1 clang-tidy-19 -p build/clang --quiet 2>&1 | sed '/[0-9] warnings generated.$/d'
