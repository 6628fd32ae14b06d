#!/usr/bin/env bash
# Runs clang-tidy over csrc, with clang's own warnings and those of its thread-safety analysis (make tidy). An argument is
# a regular expression of the groups to look at: tools/tidy.sh transport. clang-tidy is that of requirements/tidy.txt: it
# skips the system's headers and torch's, while those up to 21 spend most of their time there.
set -euo pipefail
cd "$(dirname "$0")/.."
cmake --preset debug -B build/tidy -DTORCHRPC_GROUP_KILOBYTES=1000 -DTORCHRPC_BUILD_TESTS=OFF \
  -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON
python3 - "${1:-}" <<'PYTHON' |
import json, re, sys
files = [command["file"] for command in json.load(open("build/tidy/compile_commands.json"))]
print(*(file for file in reversed(files) if re.search("/csrc/.*" + sys.argv[1], file)), sep="\n")
PYTHON
  xargs -P "$(nproc)" -n 1 .venv/bin/clang-tidy -p build/tidy --quiet --extra-arg=-Wthread-safety \
    --extra-arg=-Wno-deprecated-declarations --extra-arg=-Wno-unused-command-line-argument
