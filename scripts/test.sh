#!/usr/bin/env bash
# Builds everything and runs the tests. The last lines are the summary of ctest.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/test.sh [--build-only] [--preset P] [-- CTEST_ARGUMENT...]

Installs missing packages, builds a preset (default cpu) and runs its tests.

  --build-only   do not run the tests
  --preset P     a preset of CMakePresets.json, such as cpu-asan or cuda
  --help         print this text

Examples:
  scripts/test.sh -- -L fast              the quick tests
  scripts/test.sh -- -R Sharding -V       selected tests, with their output
TEXT
}
bad_usage() {
  echo "test.sh: $1" >&2
  usage >&2
  exit 2
}

preset=cpu
run_tests=yes
while [ $# -gt 0 ]; do
  case "$1" in
    --build-only) run_tests=no; shift ;;
    --preset) [ $# -ge 2 ] || bad_usage "--preset needs a name"; preset=$2; shift 2 ;;
    --preset=*) preset=${1#--preset=}; shift ;;
    -h | --help) usage; exit 0 ;;
    --) shift; break ;;
    *) bad_usage "unknown argument '$1' (arguments for ctest go after --)" ;;
  esac
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh $([ "$preset" != cuda ] || echo --cuda)
scripts/build.sh "$preset" --grouped
if [ "$run_tests" = yes ]; then
  exec ctest --test-dir "build/$preset" --output-on-failure -j3 "$@" </dev/null
fi
