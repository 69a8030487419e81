#!/usr/bin/env bash
# Packs a build for tests and measurements on another machine with a GPU: the stripped programs of
# build/cuda, their ctest files and the data. On that machine, in a copy of the source tree, run
# scripts/gpu_check.sh.
set -euo pipefail
if [ "${1-}" = --help ] || [ "${1-}" = -h ]; then
  echo "usage: scripts/gpu_pack.sh [FOLDER]    (default: build/travel)"
  exit 0
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-build/travel}
if ! grep -qs '^COHORT_ARCH:.*=x86-64-v' build/cuda/CMakeCache.txt; then
  echo "gpu_pack.sh: build/cuda is missing, or for this machine's CPU only: run scripts/build.sh cuda first" >&2
  exit 1
fi
rm -rf "$folder"
mkdir -p "$folder"
target=$(mktemp -d)
trap 'rm -rf "$target"' EXIT
mkdir -p "$target/build/tests" "$target/build/bench"
cp build/cuda/cohort "$target/build/"
cp build/cuda/tests/*_test "$target/build/tests/"
cp build/cuda/bench/cohort_bench_* build/cuda/bench/*.so "$target/build/bench/"
find "$target/build" -type f -exec strip {} +
cp build/cuda/CTestTestfile.cmake "$target/build/"
cp build/cuda/tests/*.cmake "$target/build/tests/"
cp build/cuda/bench/*.cmake "$target/build/bench/" 2>/dev/null || true
# ctest lists the tests with a script of the CMake that configured them.
script=$(grep -ho '"[^"]*GoogleTestAddTests.cmake"' build/cuda/tests/core_test*_include.cmake | head -n 1 | tr -d '"')
cp "$script" "$target/build/tests/"
sed -i "s|$script|$PWD/build/cuda/tests/GoogleTestAddTests.cmake|" "$target"/build/tests/*_include.cmake
# The source directory that ctest expects.
grep '^CMAKE_HOME_DIRECTORY' build/cuda/CMakeCache.txt | cut -d= -f2 >"$target/source_dir"
data=${COHORT_TEST_DATA:-../shared/data}
if [ -d "$data" ]; then
  mkdir -p "$target/data"
  cp -r "$data"/{tinyshakespeare,countdown,encoder,grpo_truth,models} "$target/data/"
fi
# The programs contain the same kernels: a window larger than a program compresses them only once.
tar cf - -C "$target" . | xz -T2 --lzma2=preset=3,dict=192MiB >"$folder/cohort.tar.xz"
du -h "$folder/cohort.tar.xz"
