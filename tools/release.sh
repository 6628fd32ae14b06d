#!/usr/bin/env bash
# Makes the release whose version is in CMakeLists.txt: checks, tests, wheels and sdist in dist/, then an annotated tag.
# It pushes and uploads nothing; it prints the commands for that.
# Usage: tools/release.sh [--check | --dry-run]
#   --check    only the first step: the tree, the tag and the version
#   --dry-run  everything but the tag
set -euo pipefail
cd "$(dirname "$0")/.."
mode=${1:-}
case $mode in
  "" | --check | --dry-run) ;;
  *) sed -n 's/^# \{0,1\}//; 2,6p' "$0" >&2; exit 2 ;;
esac
say() { printf '\n== %s\n' "$*"; }
refuse() { printf 'No release: %s\n' "$*" >&2; exit 1; }

# --- The tree, the tag and the version -------------------------------------------------------------------------------
version=$(sed -nE 's/^project\(torchrpc VERSION ([0-9.]+).*/\1/p' CMakeLists.txt)
[ -n "$version" ] || refuse "CMakeLists.txt names no version"
tag=v$version
changes=$(git status --porcelain)
[ -z "$changes" ] || refuse "the tree has changes that are not committed:"$'\n'"$changes"
! git rev-parse --quiet --verify "refs/tags/$tag" >/dev/null || refuse "the tag $tag exists"

heading=$(grep -m 1 '^## ' CHANGELOG.md || true)
[[ $heading =~ ^"## $version ("([0-9]{4}-[0-9]{2}-[0-9]{2})")"$ ]] ||
  refuse "the first section of CHANGELOG.md is '$heading', and should be '## $version (YEAR-MONTH-DAY)'"
date=${BASH_REMATCH[1]}
cited() { sed -nE "s/^$1: *['\"]?([^'\"]*)['\"]?$/\1/p" CITATION.cff; }
[ "$(cited version)" = "$version" ] ||
  refuse "CITATION.cff has version '$(cited version)', and CMakeLists.txt $version"
[ "$(cited date-released)" = "$date" ] ||
  refuse "CITATION.cff has the date '$(cited date-released)', and CHANGELOG.md $date"
say "Version $version of $date, commit $(git rev-parse --short HEAD)"
[ "$mode" != --check ] || exit 0

# --- Tests and packages ----------------------------------------------------------------------------------------------
commit=$(git rev-parse HEAD)
for target in lint test conformance wheels; do
  say "make $target"
  make "$target"
done
say "The sdist"
.venv/bin/python -m build --sdist --no-isolation --outdir dist
say "The metadata of the packages"
packages=(dist/torchrpc-"$version"-*.whl dist/torchrpc-"$version".tar.gz)
for package in "${packages[@]}"; do
  [ -e "$package" ] || refuse "$package was not built"
done
others=$(find dist -maxdepth 1 -type f \( -name '*.whl' -o -name '*.tar.gz' \) ! -name "torchrpc-$version[.-]*")
[ -z "$others" ] || refuse "dist/ has packages of other versions: $others"
.venv/bin/python -m twine check --strict "${packages[@]}"

# --- The tag ---------------------------------------------------------------------------------------------------------
changes=$(git status --porcelain)
[ -z "$changes" ] || refuse "the steps above changed the tree:"$'\n'"$changes"
[ "$(git rev-parse HEAD)" = "$commit" ] || refuse "there is another commit than the one that was tested, $commit"
if [ "$mode" = --dry-run ]; then
  say "Everything passed. Without --dry-run this would make the tag $tag."
  exit 0
fi
git tag --annotate "$tag" --message "torchrpc $version" "$commit"
say "Made the tag $tag. To publish it (.github/workflows/wheels.yml then builds the wheels and uploads them):
   git push origin $tag
To upload the packages of this machine instead:
   .venv/bin/python -m twine upload ${packages[*]}
To take the tag back:
   git tag --delete $tag"
