#!/usr/bin/env bash
# Runs the tutorials; what they print and draw goes to docs/tutorials, for their pages on the site.
# Usage: tools/tutorial_results.sh [NAME…]
set -euo pipefail
cd "$(dirname "$0")/.."
results=$PWD/docs/tutorials
names=("$@")
[ ${#names[@]} -gt 0 ] || names=($(cd tutorials && ls ./*.py | sed 's#./##; s#\.py$##'))
for name in "${names[@]}"; do
  echo "== $name"
  (cd tutorials && "${PYTHON:-python}" -m torchrpc "$name.py" --output "$results/$name.png" >"$results/$name.txt")
  sed -i "s#$results/##" "$results/$name.txt"
done
