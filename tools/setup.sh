#!/usr/bin/env bash
# Makes the environment in .venv, for the Makefile: system packages where they can be installed, else a word about
# what is missing; then Python packages. Usage: tools/setup.sh demo|test|clang; `clang` is
# `test` for the steps that fail without clang. Quick when all is there.
set -euo pipefail
cd "$(dirname "$0")/.."
purpose=$1
say() { printf '\n== %s\n' "$*"; }

# --- system packages -------------------------------------------------------------------------------------------------
python=$(command -v python3.11 || command -v python3 || true)
has_header() { echo "#include <$1>" | g++ -x c++ -E - >/dev/null 2>&1; }
has_python_headers() {
  [ -e "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ]
}
has_clang_runtime() { ls "$(clang++-19 -print-resource-dir)"/lib/*/libclang_rt.fuzzer* >/dev/null 2>&1; }
can_make_venv() { "$python" -c 'import ensurepip, venv' 2>/dev/null; }

required=()  # the purpose fails without
optional=()
command -v g++ >/dev/null || required+=(g++)
if [ -z "$python" ]; then
  required+=(python3 python3-venv python3-dev)
else
  version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
  can_make_venv || required+=("$version-venv")
  has_python_headers || required+=("$version-dev")
fi
has_header uv.h || required+=(libuv1-dev)
has_header sodium.h || required+=(libsodium-dev)
if [ "$purpose" != demo ]; then
  has_header catch2/catch.hpp || required+=(catch2)
  command -v openssl >/dev/null || required+=(openssl)  # certificates for tests
  has_header benchmark/benchmark.h || optional+=(libbenchmark-dev)
  command -v doxygen >/dev/null || optional+=(doxygen)
  command -v abidiff >/dev/null || optional+=(abigail-tools)
  # One version of clang, so that every machine warns alike: that of CMakePresets.json.
  clang=()
  command -v clang++-19 >/dev/null || clang+=(clang-19)
  command -v clang-tidy-19 >/dev/null || clang+=(clang-tidy-19)
  has_clang_runtime || clang+=(libclang-rt-19-dev)
  command -v llvm-symbolizer-19 >/dev/null || clang+=(llvm-19)  # suppressions name functions
  if [ "$purpose" = clang ]; then required+=("${clang[@]}"); else optional+=("${clang[@]}"); fi
fi
command -v ccache >/dev/null || optional+=(ccache)

if [ ${#required[@]} -gt 0 ] || [ ${#optional[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ]; then as_root=(env); else as_root=(sudo -n); fi
  if command -v apt-get >/dev/null && "${as_root[@]}" true 2>/dev/null; then
    say "Installing system packages: ${required[*]} ${optional[*]}"
    install() {
      "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" </dev/null
    }
    "${as_root[@]}" apt-get update -qq || true
    # One that the distribution lacks keeps apt-get from installing any of the others.
    install "${required[@]}" "${optional[@]}" || for package in "${required[@]}" "${optional[@]}"; do
      install "$package" || say "apt-get could not install $package"
    done
    required_failed=$(for package in "${required[@]}"; do dpkg -s "$package" >/dev/null 2>&1 || echo "$package"; done)
  else
    required_failed=${required[*]}
    [ ${#optional[@]} -eq 0 ] || say "Going on without ${optional[*]} (optional; Debian's and Ubuntu's package names)"
  fi
  if [ -n "$required_failed" ]; then
    say "Please install, then try again: $required_failed
   On Debian and Ubuntu: sudo apt-get install ${required_failed//$'\n'/ }" >&2
    exit 1
  fi
  python=$(command -v python3.11 || command -v python3)
fi

# --- Python packages -------------------------------------------------------------------------------------------------
if [ ! -x .venv/bin/python ]; then
  say "Creating .venv with $("$python" --version)"
  "$python" -c 'import sys; sys.exit("torchrpc needs Python 3.10 or newer" if sys.version_info < (3, 10) else 0)'
  "$python" -m venv .venv
fi
stamp=.venv/requirements.installed
if ! cmp -s requirements-dev.txt "$stamp"; then
  say "Installing Python packages into .venv (torch among them: this takes a while the first time)"
  .venv/bin/python -m pip install --disable-pip-version-check --requirement requirements-dev.txt
  cp requirements-dev.txt "$stamp"
fi
