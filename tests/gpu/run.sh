#!/usr/bin/env bash
# The tests and the benchmark that need a GPU, in one run of at most ten minutes. Two processes share the GPU.
# Usage: tests/gpu/run.sh [WHEEL]
#
# WHEEL: one for this machine's torch and Python (`make wheels`); without it, this tree is built here, which needs a
# compiler, CMake, Ninja, libuv and libsodium. Results go to $OUT (default: build/gpu), the summary to standard output.
# Environment: SKIP="sanitizer benchmark" leaves steps out.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-build/gpu}
python=${PYTHON:-python3}
mkdir -p "$out"
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
failed=0
step() {
  local name=$1 start=$SECONDS
  shift
  case " ${SKIP:-} " in *" $name "*) return ;; esac
  printf '\n== %s\n' "$name"
  "$@" >"$out/$name.log" 2>&1 || { failed=1; printf 'FAILED: '; }
  printf '%s took %d s; its last lines:\n' "$name" $((SECONDS - start))
  tail -n "${LINES_SHOWN:-12}" "$out/$name.log"
}

install() {
  if [ $# -gt 0 ]; then
    "$python" -m pip install --disable-pip-version-check --no-deps --force-reinstall --target "$site" "$1"
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
  else
    cmake --preset release -DPython_EXECUTABLE="$(command -v "$python")" -DTORCHRPC_BUILD_TESTS=OFF &&
      cmake --build build/release --target torchrpc_package &&
      cmake --install build/release --component python --prefix python/torchrpc
    export PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH}
  fi
}

sanitize() {  # races of the staging copies, and accesses out of bounds
  local tool
  # torchrpc asks CUDA whether a process can read the memory of another one. The answer "no" is a call that fails, so the
  # first tool does not report calls that fail.
  for tool in "memcheck --report-api-errors no" racecheck; do
    # shellcheck disable=SC2086
    compute-sanitizer --tool $tool --target-processes all --error-exitcode 9 \
      "$python" benchmarks/devices.py --sizes 4K,1M,16M --seconds 0.1 --rpc torchrpc || return
  done
}

printf '== install\n'
install "$@" >"$out/install.log" 2>&1 || { tail -n 20 "$out/install.log"; exit 1; }
step environment sh -c "nvidia-smi; $python -c 'import torch, torchrpc; print(torch.__version__, torchrpc.__version__, torch.cuda.get_device_name())'"
step doctor "$python" -m torchrpc doctor
LINES_SHOWN=110 step torch-suite "$python" tests/accelerator/torch_cuda_tests.py --device cuda -j 4
step ways "$python" tests/gpu/ways.py
LINES_SHOWN=40 step benchmark "$python" benchmarks/devices.py --sizes 4K,64K,1M,64M,1G
if command -v compute-sanitizer >/dev/null; then step sanitizer sanitize; fi
exit $failed
