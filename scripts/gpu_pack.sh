#!/usr/bin/env bash
# Collects what a machine with a GPU needs to test and measure a build made elsewhere: the programs of
# build/cuda, stripped, the files by which ctest knows them, and the data. On that machine, in a copy
# of the source tree, run scripts/gpu_check.sh.
set -euo pipefail
if [ "${1-}" = --help ] || [ "${1-}" = -h ]; then
  echo "usage: scripts/gpu_pack.sh [FOLDER]    (default: build/travel)"
  exit 0
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=${1:-build/travel}
rm -rf "$target"
mkdir -p "$target/build/tests" "$target/build/bench"
cp build/cuda/cohort "$target/build/"
cp build/cuda/tests/*_test "$target/build/tests/"
cp build/cuda/bench/cohort_bench_* build/cuda/bench/*.so "$target/build/bench/"
find "$target/build" -type f -exec strip {} +
cp build/cuda/CTestTestfile.cmake "$target/build/"
cp build/cuda/tests/*.cmake "$target/build/tests/"
cp build/cuda/bench/*.cmake "$target/build/bench/" 2>/dev/null || true
# Where ctest will look for them.
grep '^CMAKE_HOME_DIRECTORY' build/cuda/CMakeCache.txt | cut -d= -f2 >"$target/source_dir"
data=${COHORT_TEST_DATA:-../shared/data}
if [ -d "$data" ]; then
  mkdir -p "$target/data"
  cp -r "$data"/{tinyshakespeare,countdown,grpo_truth} "$target/data/"
fi
du -sh "$target" | cut -f1
