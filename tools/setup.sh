#!/usr/bin/env bash
# Makes the environment in .venv, for the Makefile: installs what the purpose needs of system packages, or says what to
# install if it may not; then Python packages (requirements/). Takes no time when everything is there.
#
# Usage: tools/setup.sh PURPOSE [COMMAND...]
# COMMAND builds torchrpc. It runs as soon as the packages in requirements/build.txt are there, while the other Python
# packages are installed. For the purpose `demo`, it does not run if there is a wheel to install (install_wheel).
set -euo pipefail
cd "$(dirname "$0")/.."
purpose=${1:-}
shift || true
say() { printf '\n== %s\n' "$*"; }

# What each purpose needs: kinds of system packages (find_missing), and files in requirements/ besides build.txt. It
# continues without the optional ones.
optional=()
tested=(demo tutorials typing test)
case $purpose in
  demo) system=(compiler) packages=(demo) ;;
  test) system=(compiler tests) packages=("${tested[@]}") ;;
  clang) system=(compiler tests clang) packages=("${tested[@]}") ;;
  tidy) system=(compiler) packages=(tidy) ;;
  check) system=(compiler tests clang) optional=(doxygen abidiff ccache) packages=("${tested[@]}" lint tidy docs) ;;
  bench) system=(compiler benchmark) packages=() ;;
  abi) system=(compiler abidiff) packages=() ;;
  lint) system=() packages=(typing lint) ;;
  docs) system=(compiler) optional=(doxygen) packages=(demo docs) ;;
  headers) system=(compiler clang) packages=(uv) ;;
  wheels) system=(compiler) packages=(uv wheels) ;;
  *) sed -n 's/^# \{0,1\}//; 2,7p' "$0" >&2; exit 2 ;;
esac

# --- System packages -------------------------------------------------------------------------------------------------
# The names of packages are Debian's and Ubuntu's.
has() { command -v "$1"; }
has_header() { echo "#include <$1>" | g++ -x c++ -E -; }
has_python_headers() { [ -e "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ]; }
has_clang_runtime() { ls "$(clang++-19 -print-resource-dir)"/lib/*/libclang_rt.fuzzer*; }

# find_missing KIND...: sets `missing` to the packages of these kinds that are not there.
find_missing() {
  local kind
  missing=()
  python=$(command -v python3.11 || command -v python3 || true)
  local version=python3
  if [ -n "$python" ]; then version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])'); fi
  for kind; do
    case $kind in
      python)
        need python3 test -n "$python"
        need "$version-venv" "$python" -c 'import ensurepip, venv'
        ;;
      compiler)
        need g++ has g++
        need "$version-dev" has_python_headers
        need libuv1-dev has_header uv.h
        need libsodium-dev has_header sodium.h
        ;;
      tests)
        need catch2 has_header catch2/catch.hpp
        need openssl has openssl # makes certificates
        ;;
      clang) # one version, that of CMakePresets.json, so that all machines warn alike
        need clang-19 has clang++-19
        need libclang-rt-19-dev has_clang_runtime
        need llvm-19 has llvm-symbolizer-19 # suppressions name functions
        ;;
      benchmark) need libbenchmark-dev has_header benchmark/benchmark.h ;;
      abidiff) need abigail-tools has abidiff ;;
      doxygen | ccache) need "$kind" has "$kind" ;;
    esac
  done
}
need() { "${@:2}" >/dev/null 2>&1 || missing+=("$1"); }

# install_system KIND...: installs what is missing of these kinds, and of the optional ones.
install_system() {
  find_missing "${optional[@]}"
  local wished=("${missing[@]}") as_root=(env)
  find_missing "$@"
  [ ${#missing[@]} -gt 0 ] || [ ${#wished[@]} -gt 0 ] || return 0
  [ "$(id -u)" = 0 ] || as_root=(sudo -n)
  if command -v apt-get >/dev/null && "${as_root[@]}" true 2>/dev/null; then
    say "Installing system packages: ${missing[*]} ${wished[*]}"
    local install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends)
    "${as_root[@]}" apt-get update -qq || true
    # A package that the distribution lacks keeps apt-get from installing any of the others.
    "${install[@]}" "${missing[@]}" "${wished[@]}" </dev/null || for package in "${missing[@]}" "${wished[@]}"; do
      "${install[@]}" "$package" </dev/null || say "apt-get could not install $package"
    done
    find_missing "$@"
  elif [ ${#wished[@]} -gt 0 ]; then
    say "Going on without ${wished[*]} (optional; names of packages of Debian and Ubuntu)"
  fi
  [ ${#missing[@]} -gt 0 ] || return 0
  say "Please install, then try again: ${missing[*]}
   On Debian and Ubuntu: sudo apt-get install ${missing[*]}" >&2
  exit 1
}

# --- Python packages -------------------------------------------------------------------------------------------------
# One pip at a time changes .venv. It compiles no module: Python compiles those that a program imports, which are few.
pip_install() { flock .venv/pip.lock .venv/bin/python -m pip install --disable-pip-version-check --no-compile "$@"; }

# find_changed FILE...: sets `changed` to those that are not installed as they are now.
find_changed() {
  local file
  changed=()
  for file; do cmp -s "requirements/$file.txt" ".venv/requirements/$file.txt" || changed+=("$file"); done
}
install_python() { # install_python FILE...
  local file
  pip_install $(printf -- '--requirement requirements/%s.txt ' "$@")
  mkdir -p .venv/requirements
  for file; do cp "requirements/$file.txt" .venv/requirements/; done
}

# A wheel of this version of torchrpc makes the build unnecessary. It is looked for in dist/, and in the indexes and folders
# that pip's environment variables name, not in PyPI.
version=$(sed -nE 's/^project\(torchrpc VERSION ([0-9.]+).*/\1/p' CMakeLists.txt)
indexes=(${PIP_INDEX_URL:-} ${PIP_EXTRA_INDEX_URL:-})
may_have_wheel() {
  [ "$purpose" = demo ] && [ ! -e .venv/torchrpc.installed ] || return
  [ -n "${indexes[*]}${PIP_FIND_LINKS:-}" ] || compgen -G "dist/torchrpc-$version-*.whl" >/dev/null
}
install_wheel() {
  local from=(--no-index) index
  if [ ${#indexes[@]} -gt 0 ]; then
    from=(--index-url "${indexes[0]}")
    for index in "${indexes[@]:1}"; do from+=(--extra-index-url "$index"); done
  fi
  PIP_INDEX_URL='' PIP_EXTRA_INDEX_URL='' pip_install "${from[@]}" --find-links dist --only-binary torchrpc \
    --constraint requirements/build.txt "torchrpc==$version" >.venv/wheel.log 2>&1 || return
  say "Using a wheel of torchrpc instead of building it:"
  grep -E '^ *(Processing|Downloading|Using cached|Requirement already satisfied: torchrpc).*torchrpc' .venv/wheel.log
}

# --- All of it -------------------------------------------------------------------------------------------------------
if may_have_wheel; then install_system python; else install_system python "${system[@]}"; fi
if [ ! -x .venv/bin/python ]; then
  say "Creating .venv with $("$python" --version)"
  "$python" -c 'import sys; sys.exit("torchrpc needs Python 3.10 or newer" if sys.version_info < (3, 10) else 0)'
  "$python" -m venv .venv
fi
find_changed build
if [ ${#changed[@]} -gt 0 ]; then
  say "Installing torch and the tools of the build into .venv (about a minute)"
  install_python build
fi
if may_have_wheel; then
  if install_wheel; then set --; else install_system "${system[@]}"; fi
fi

find_changed "${packages[@]}"
installing=
if [ ${#changed[@]} -gt 0 ]; then
  if [ $# -eq 0 ]; then
    say "Installing the other Python packages into .venv"
    install_python "${changed[@]}"
  else
    say "Installing the other Python packages into .venv during the build (log: .venv/packages.log)"
    set -m # so that kill reaches pip, too
    install_python "${changed[@]}" >.venv/packages.log 2>&1 &
    installing=$!
    set +m
    trap 'kill -- -$installing 2>/dev/null || true' EXIT
  fi
fi
"$@"
if [ -n "$installing" ] && ! wait "$installing"; then
  cat .venv/packages.log >&2
  exit 1
fi
