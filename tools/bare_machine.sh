#!/usr/bin/env bash
# Runs the two commands of README.md as on a new machine: in a minimal Debian 12 with only the programs that README.md
# asks for, in a fresh clone of the current commit. Prints the wall time of each command, and what it skipped. The Debian
# is a chroot that is made for this run and removed after it. Needs root, and debootstrap (installed if it is missing).
#
# Usage: tools/bare_machine.sh [--user] [--cache FILE] [COMMAND...]
#   --user        Run the commands as a user without root rights. If a command asks for system packages, install them as
#                 it says, and run it again.
#   --cache FILE  Take the installed Debian from this tar archive; write it first if there is none.
#   COMMAND...    Run these instead of 'make demo' and 'make test', each in the clone. The first that fails is the last.
#
# The machine's configuration of apt and pip, its proxies and its certificates also apply in the chroot.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '\n== %s\n' "$*"; }

# --- Outside: options, and removing everything -----------------------------------------------------------------------
# The second part of this script has a mount namespace and a process namespace of its own. When it ends, for whatever
# reason, the kernel ends its processes and removes its mounts. So the chroot holds only its own files when it is removed.

if [ "${1:-}" != --inside ]; then
  user=root cache=""
  while [[ ${1:-} == --* ]]; do
    case $1 in
      --user) user=visitor ;;
      --cache) cache=$(realpath -m "$2"); shift ;;
      *) sed -n 's/^# \{0,1\}//; 2,13p' "$0" >&2; exit 2 ;;
    esac
    shift
  done
  [ $# -gt 0 ] || set -- "make demo" "make test"
  [ "$(id -u)" = 0 ] || { echo "tools/bare_machine.sh needs root, to make a chroot." >&2; exit 1; }
  if ! command -v debootstrap >/dev/null; then
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends debootstrap debian-archive-keyring </dev/null
  fi
  machine=$(mktemp -d "${TMPDIR:-/var/tmp}/bare_machine.XXXXXX")
  inside=
  remove() {
    [ -z "$inside" ] || { kill -KILL "$inside" 2>/dev/null; wait "$inside" 2>/dev/null; }
    rm -rf --one-file-system "$machine"
  }
  trap 'remove || true' EXIT
  trap 'exit 130' INT TERM HUP
  set -m  # else the commands would ignore SIGINT, as every background job of a script does
  unshare --mount --pid --fork --kill-child "$0" --inside "$machine" "$user" "$cache" "$@" </dev/null &
  inside=$!
  wait "$inside"
  exit
fi

# --- Inside: the machine ---------------------------------------------------------------------------------------------
machine=$2 user=$3 cache=$4
shift 4
suite=bookworm  # its Python is 3.11
start=$SECONDS
if [ -n "$cache" ] && [ -f "$cache" ]; then
  tar -xf "$cache" -C "$machine"
else
  mirror=$(apt-get indextargets --format '$(SITE)' "Codename: $suite" 'Component: main' 2>/dev/null | head -n 1)
  debootstrap --variant=minbase --include=python3,g++,make,git "$suite" "$machine" \
    "${mirror:-http://deb.debian.org/debian}" >"$machine.log" 2>&1 || { cat "$machine.log"; rm "$machine.log"; exit 1; }
  rm "$machine.log"
  if [ -n "$cache" ]; then
    mkdir -p "$(dirname "$cache")"
    tar -cf "$cache.new" --one-file-system -C "$machine" .
    mv "$cache.new" "$cache"
  fi
fi

mount -t proc proc "$machine/proc"
mount --bind /sys "$machine/sys"
mount -o remount,bind,ro "$machine/sys"
mount -t tmpfs -o mode=755 tmpfs "$machine/dev"
for device in null zero full random urandom tty; do
  touch "$machine/dev/$device"
  mount --bind "/dev/$device" "$machine/dev/$device"
done
mkdir "$machine/dev/shm" "$machine/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$machine/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$machine/dev/pts"
ln -s pts/ptmx "$machine/dev/ptmx"
ln -s /proc/self/fd "$machine/dev/fd"
for number in 0 1 2; do ln -s "/proc/self/fd/$number" "$machine/dev/$(cut -d' ' -f$((number + 1)) <<<"stdin stdout stderr")"; done

# --- What applies to this machine applies to the new one -------------------------------------------------------------
home=/root
if [ "$user" != root ]; then
  chroot "$machine" useradd --create-home --shell /bin/bash "$user"
  home=/home/$user
fi
copy() { [ ! -e "$1" ] || { mkdir -p "$machine/$(dirname "$2")"; cp -rL "$1" "$machine/$2"; }; }
copy /etc/hosts /etc/hosts
copy /etc/resolv.conf /etc/resolv.conf
copy /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
copy /etc/ssl/certs/ca-certificates.crt /usr/local/share/ca-certificates/carried.crt # else its package replaces the file
apt-config dump | grep '^Acquire' >"$machine/etc/apt/apt.conf.d/00carried" || true
copy /etc/pip.conf /etc/pip.conf
copy /etc/xdg/pip /etc/xdg/pip
copy "$HOME/.config/pip" "$home/.config/pip"
variables=()
while IFS= read -r variable; do
  variables+=("$variable")
done < <(env | grep -E '^(PIP_|SSL_CERT_|REQUESTS_CA_BUNDLE=|CURL_CA_BUNDLE=)|^[a-z]+_proxy=|^[A-Z]+_PROXY=')
# Folders of packages on this machine. The pages of an index, in simple/, link to files beside that folder.
{ printf '%s\n' "${variables[@]}"; cat "$machine"/etc/pip.conf "$machine"/etc/xdg/pip/* "$machine$home"/.config/pip/* || true; } 2>/dev/null |
  grep -v ^# | grep -oE '(^|[ =]|file://)/[^ ]+' | sed -E 's#^([ =]|file://)##; s#/simple/?$##' | sort -u |
  while read -r folder; do
    if [ -d "$folder" ] && [ ! -e "$machine$folder" ]; then
      mkdir -p "$machine$folder"
      mount --bind "$folder" "$machine$folder"
      mount -o remount,bind,ro "$machine$folder"
    fi
  done

git -c safe.directory='*' clone --quiet --no-local . "$machine$home/torchrpc"
chroot "$machine" chown -R "$user:" "$home"
chroot "$machine" chmod 755 /
commit=$(git -c safe.directory='*' log -1 --format='%h %s')
say "A Debian with $(chroot "$machine" python3 --version), made in $((SECONDS - start)) s; user $user; $(nproc) cores; commit $commit"

# --- The commands ----------------------------------------------------------------------------------------------------
run_as() {  # run_as USER COMMAND
  local as=$1
  chroot --userspec="$as" "$machine" env -i HOME="$home" USER="$as" LOGNAME="$as" TERM="${TERM:-dumb}" "${variables[@]}" \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin bash -c "cd '$home/torchrpc' && $2" 2>&1
}
skipped() {
  grep -aE '^SKIPPED|Going on without' "$log" || true
  # ctest shows nothing of what passed.
  grep -ahoE 'skipped: .*' "$machine$home"/torchrpc/build/release/Testing/Temporary/LastTest.log 2>/dev/null | sort | uniq -c || true
}

log=$machine/var/log/command
summary=()
for command in "$@"; do
  while :; do
    say "$command"
    start=$SECONDS status=0
    run_as "$user" "$command" | tee "$log" || status=$?
    wanted=$(sed -nE 's/.*sudo apt-get install (.*)/\1/p' "$log" | tail -n 1)
    if [ $status = 0 ] || [ "$user" = root ] || [ -z "$wanted" ] || [ "$wanted" = "${installed:-}" ]; then break; fi
    say "As the command says: apt-get install $wanted"
    run_as root "apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $wanted"
    installed=$wanted
  done
  summary+=("$(printf '%5d s  %s%s' $((SECONDS - start)) "$command" "$([ $status = 0 ] || echo ": FAILED ($status)")")")
  summary+=("$(skipped)")
  [ $status = 0 ] || break
done
say "As $user, commit $commit"
printf '%s\n' "${summary[@]}"
exit $status
