#!/usr/bin/env bash
# Runs the fuzzers (make fuzz builds them): RUNS executions of each, or SECONDS_EACH seconds if that is set. What one finds
# is left in build/fuzz/findings; run the program with the file as its argument to see it again. Inputs that reach new
# code are kept in build/fuzz/corpus, beside those of tests/fuzz/corpus, which stay as they are. Then the fuzzer of what
# Python reads, which is a Python program.
set -uo pipefail
cd "$(dirname "$0")/../.."
limit=(-runs="${RUNS:-100000}")
[ -z "${SECONDS_EACH:-}" ] || limit=(-max_total_time="$SECONDS_EACH")
export ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
total=0 failed=0
for target in ${TARGETS:-handshake records frames message tensor value}; do
  mkdir -p "build/fuzz/corpus/$target" build/fuzz/findings
  log=build/fuzz/$target.log
  build/clang/tests/fuzz/fuzz_"$target" "${limit[@]}" -seed="${SEED:-1}" -max_len=4096 -print_final_stats=1 -verbosity=1 \
    -artifact_prefix=build/fuzz/findings/"$target"- "build/fuzz/corpus/$target" "tests/fuzz/corpus/$target" \
    >"$log" 2>&1 || { failed=1; grep -E 'ERROR|SUMMARY|Test unit' "$log"; }
  executed=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  total=$((total + ${executed:-0}))
  printf '%-10s %12s executions\n' "$target" "${executed:-?}"
done
python=(--executions "${RUNS:-100000}")
[ -z "${SECONDS_EACH:-}" ] || python=(--executions 1000000000 --seconds "$SECONDS_EACH")
.venv/bin/python tests/fuzz/plain_objects.py --seed "${SEED:-1}" "${python[@]}" || failed=1
printf '%-10s %12s executions, %s\n' all "$total" "$([ $failed = 0 ] && echo clean || echo 'FINDINGS (see above)')"
exit $failed
