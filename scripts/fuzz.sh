#!/usr/bin/env bash
# Fuzzes the parsers of untrusted files under the address and undefined behaviour sanitizers. A finding
# stops its target and leaves the failing input in build/fuzz.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/fuzz.sh [--runs N] [--seconds S] [TARGET...]

Builds preset fuzz (clang) and runs each target of tests/fuzz on N inputs or for S seconds (default:
1000000 and no limit), starting with those of tests/fuzz/corpus.
TEXT
}
runs=1000000 seconds=0 targets=()
while [ $# -gt 0 ]; do
  case "$1" in
    --runs) runs=$2; shift 2 ;;
    --seconds) seconds=$2; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    -*) echo "fuzz.sh: unknown argument '$1'" >&2; usage >&2; exit 2 ;;
    *) targets+=("$1"); shift ;;
  esac
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh --dev
scripts/build.sh fuzz fuzzers
[ ${#targets[@]} -gt 0 ] || for source in tests/fuzz/*_fuzz.cpp; do
  targets+=("$(basename "$source" _fuzz.cpp)")
done
for target in "${targets[@]}"; do
  found=build/fuzz/corpus/$target
  mkdir -p "$found"
  inputs=("$found") dictionary=tests/fuzz/$target.dict
  [ ! -d tests/fuzz/corpus/"$target" ] || inputs+=(tests/fuzz/corpus/"$target")
  log=build/fuzz/$target.log
  if ! build/fuzz/tests/fuzz/"${target}_fuzz" "${inputs[@]}" -runs="$runs" \
    -max_total_time="$seconds" -max_len=4096 -timeout=10 -rss_limit_mb=1536 -malloc_limit_mb=512 \
    -artifact_prefix="build/fuzz/$target-" $([ ! -f "$dictionary" ] || echo -dict="$dictionary") >"$log" 2>&1; then
    tail -n 30 "$log"
    exit 1
  fi
  echo "$target: $(grep -oE 'Done [0-9]+ runs in [0-9]+ second' "$log")s, no finding"
done
