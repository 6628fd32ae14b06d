#!/usr/bin/env bash
# Compiles torchrpc for aarch64 on a machine of another kind, and runs its tests there in an emulator (qemu-user).
# Usage: tools/aarch64.sh [STEP…], of: prepare build cpp wheel python. Without one: all of them.
#
# The emulator runs one instruction for several of the machine's, and has the machine's order of memory accesses: it
# shows that the code is right for aarch64's types, alignment, system calls and libraries, not that its fences are.
#
# Everything is in build/aarch64 and build/aarch64-env: the target's libraries are unpacked there, not installed, and
# apt has a state of its own there. Environment: JOBS (default: all cores), ONLY="base wire" (test programs).
set -euo pipefail
cd "$(dirname "$0")/.."
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(prepare build cpp wheel python)
host_python=$PWD/.venv/bin/python
build=$PWD/build/aarch64
env=${TORCHRPC_AARCH64_ENV:-$PWD/build/aarch64-env}
sysroot=$env/sysroot
site=$env/site
stubs=$env/stubs
torch=$(grep -m1 '^torch==' requirements/build.txt)
torch=${torch%%[ ;#]*}
say() { printf '\n== %s\n' "$*"; }

# Graviton 2's processor: the oldest that torch's own wheels are commonly run on.
emulator=(qemu-aarch64-static -cpu neoverse-n1 -L "$sysroot" -E "LD_LIBRARY_PATH=$stubs")
layers=(base wire transport testing agent device profiling rref autograd optim observe node api simulation)

# --- prepare ---------------------------------------------------------------------------------------------------------

require_tools() {
  local missing=()
  command -v aarch64-linux-gnu-g++ >/dev/null || missing+=(g++-aarch64-linux-gnu)
  command -v qemu-aarch64-static >/dev/null || missing+=(qemu-user-static)
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "$(id -u)" = 0 ]; then as_root=(env); else as_root=(sudo -n); fi
  say "Installing ${missing[*]}"
  "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null && return
  say "Please install, then try again: sudo apt-get install ${missing[*]}" >&2
  exit 1
}

# Debian's packages for the target, with what they depend on.
unpack_debian() {
  local apt=$env/apt package
  mkdir -p "$apt"/state/lists/partial "$apt"/cache/archives/partial "$sysroot"
  : >"$apt/state/status"
  cat >"$apt/apt.conf" <<END
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
Dir::State "$apt/state";
Dir::State::status "$apt/state/status";
Dir::Cache "$apt/cache";
END
  APT_CONFIG=$apt/apt.conf apt-get update -qq
  APT_CONFIG=$apt/apt.conf apt-get install -y -qq --download-only --no-install-recommends python3.11-minimal \
    libpython3.11-stdlib libpython3.11-dev libuv1-dev libsodium-dev catch2 libstdc++6 </dev/null
  for package in "$apt"/cache/archives/*.deb; do
    case ${package##*/} in
      libc6-dev_* | libc-dev-bin_* | linux-libc-dev_* | libcrypt-dev_* | libnsl-dev_* | libtirpc-dev_*) ;;  # the compiler's own
      *) dpkg -x "$package" "$sysroot" ;;
    esac
  done
  ln -sfn ../aarch64-linux-gnu "$sysroot/usr/include/python3.11/aarch64-linux-gnu"  # where Python.h looks for pyconfig.h
}

# The emulator shows programs the files of the machine where the sysroot has none. torch reads which processor it has.
describe_processor() {
  local number
  mkdir -p "$sysroot/proc"
  for ((number = 0; number < $(nproc); ++number)); do
    printf 'processor\t: %d\nFeatures\t: fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp asimdrdm lrcpc asimddp\n' $number
    printf 'CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n\n'
    mkdir -p "$sysroot/sys/devices/system/cpu/cpu$number/regs/identification"
    echo 0x00000000413fd0c1 >"$sysroot/sys/devices/system/cpu/cpu$number/regs/identification/midr_el1"
  done >"$sysroot/proc/cpuinfo"
}

# torch's wheel for aarch64 is one for CUDA. Of CUDA it needs the two libraries that it calls when it is loaded; of the
# others only that they exist.
install_python_packages() {
  local pip=("$host_python" -m pip install --quiet --disable-pip-version-check --target "$site" --upgrade
    --python-version 3.11 --only-binary=:all:) tag
  for tag in manylinux_2_28 manylinux_2_27 manylinux_2_25 manylinux_2_17 manylinux2014; do pip+=(--platform "${tag}_aarch64"); done
  "${pip[@]}" --no-deps "$torch" 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cupti==13.0.*'
  "${pip[@]}" numpy typing_extensions filelock sympy networkx jinja2 fsspec cloudpickle
  # Functions of libraries that are not there are looked up when they are called, and they are not.
  printf 'import os, sys\n\nsys.setdlopenflags(os.RTLD_LAZY)\n' >"$site/sitecustomize.py"
  local library needed folder
  mkdir -p "$stubs"
  for library in "$site"/torch/lib/*.so* "$site"/torch/_C*.so; do
    readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'
  done | sort -u | while read -r needed; do
    for folder in "$site"/torch/lib "$site"/nvidia/*/lib "$sysroot"{,/usr}/lib/aarch64-linux-gnu "$sysroot/lib"; do
      [ ! -e "$folder/$needed" ] || continue 2
    done
    aarch64-linux-gnu-g++ -shared -nostdlib -Wl,-soname,"$needed" -o "$stubs/$needed" -x c /dev/null
  done
}

prepare() {
  require_tools
  [ "$(cat "$env/prepared" 2>/dev/null)" != "$torch" ] || return 0
  mkdir -p "$env"
  say "Unpacking Debian's packages for aarch64"
  unpack_debian
  describe_processor
  say "Unpacking $torch for aarch64"
  install_python_packages
  cat >"$env/python" <<END
#!/bin/sh
PYTHONPATH="$site\${PYTHONPATH:+:\$PYTHONPATH}" exec ${emulator[*]} "$sysroot/usr/bin/python3.11" "\$@"
END
  chmod +x "$env/python"
  echo "$torch" >"$env/prepared"
}

# --- build -----------------------------------------------------------------------------------------------------------

build() {
  say "Compiling"
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64.cmake" \
    -DTORCHRPC_SYSROOT="$sysroot" -DCMAKE_CROSSCOMPILING_EMULATOR="$(IFS=';' && echo "${emulator[*]}")" \
    -DPython_EXECUTABLE="$env/python" -DLibTorch_DIR="$site/torch" -DTORCHRPC_BUILD_TESTS=ON
  local targets=(torchrpc_package) layer
  for layer in ${ONLY:-"${layers[@]}"}; do targets+=("${layer}_tests"); done
  cmake --build "$build" --parallel "${JOBS:-$(nproc)}" --target "${targets[@]}"
}

# --- cpp -------------------------------------------------------------------------------------------------------------

# Prints a row for each test program and each test that is left out. Fails if a test fails.
cpp() {
  local left_out=tests/aarch64_left_out.txt layer log failed=0 program filters name reason count
  say "C++ tests in the emulator"
  export TORCHRPC_TEST_LAUNCHER="${emulator[*]}"
  for layer in ${ONLY:-"${layers[@]}"}; do
    filters=("~[.]")  # hidden ones, which tests run in processes of their own
    while IFS='|' read -r program name reason; do
      [ "$program" != "$layer" ] || filters+=("~${name//,/\\,}")
    done < <(grep -v '^#' "$left_out")
    log=$build/$layer.log
    if timeout "${TIMEOUT:-3600}" "${emulator[@]}" "$build/tests/cpp/${layer}_tests" --durations yes "${filters[@]}" >"$log" 2>&1; then
      count=$(tail -n 3 "$log" | grep -o '[0-9]* test cases\?')
      printf 'passed    %-11s %s\n' "$layer" "$count"
    else
      failed=1
      printf 'FAILED    %-11s see %s\n' "$layer" "${log#"$PWD"/}"
    fi
    count=$(grep -c '^  not tested: ' "$log" || true)
    [ "$count" = 0 ] || printf 'left out  %-11s %s of them: the emulator has no futex_waitv\n' "$layer" "$count"
    while IFS='|' read -r program name reason; do
      [ "$program" != "$layer" ] || printf 'left out  %-11s "%s": %s\n' "$layer" "$name" "$reason"
    done < <(grep -v '^#' "$left_out")
  done
  return $failed
}

# --- wheel, python ---------------------------------------------------------------------------------------------------

# A wheel in build/aarch64/dist, of the binaries of the build. It needs the C++ library of the compiler's version, so it
# is one for systems like the compiler's.
wheel() {
  say "A wheel"
  rm -rf "$build/prefix" "$build/dist"
  cmake --install "$build" --component python --prefix "$build/prefix" --strip >/dev/null
  TORCHRPC_BINARIES=$build/prefix/_built "$host_python" setup.py --quiet build --build-base "$build/wheel" bdist_wheel \
    --plat-name linux_aarch64 --dist-dir "$build/dist"
  ls "$build"/dist/*.whl
}

python() {
  local package=$build/package medium port pids pid
  say "The wheel in the emulator"
  rm -rf "$package"
  "$host_python" -m zipfile --extract "$build"/dist/torchrpc-*.whl "$package"
  for medium in "shared memory" tcp; do
    port=$("$host_python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    pids=()
    for rank in 0 1; do
      PYTHONPATH=$package "$env/python" tools/aarch64_smoke.py $rank $port "$medium" &
      pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid"; done
  done
}

export PATH=$PWD/.venv/bin:$PATH
for step in "${steps[@]}"; do "$step"; done
