#!/usr/bin/env bash
# Configures preset $1 with the cache variables given as -DNAME=VALUE and builds the given targets
# (default: all). CMake's output is shown only on failure. The other scripts call this one.
# With --grouped a new build folder compiles sources in groups (CMAKE_UNITY_BUILD): a whole build takes two thirds of the
# time, but a change of one file compiles its group again.
set -euo pipefail

if [ $# -eq 0 ] || [[ $1 == -* ]]; then
  echo "usage: scripts/build.sh PRESET [--grouped] [-DNAME=VALUE...] [TARGET...]" >&2
  [ "${1-}" = --help ] && exit 0 || exit 2
fi
preset=$1
shift
variables=() grouped=
if [ "${1-}" = --grouped ]; then
  grouped=-DCMAKE_UNITY_BUILD=ON
  shift
fi
while [[ ${1-} == -D* ]]; do
  variables+=("$1")
  shift
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -z "$grouped" ] || [ -f "build/$preset/build.ninja" ] || variables+=("$grouped")
# CMake looks for nvcc only on PATH.
nvcc=/usr/local/cuda/bin/nvcc
if [ -z "${CUDACXX-}" ] && ! command -v nvcc >/dev/null && [ -x $nvcc ]; then
  export CUDACXX=$nvcc
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! cmake --preset "$preset" "${variables[@]}" >"$log" 2>&1 </dev/null; then
  cat "$log" >&2
  echo "build.sh: CMake could not configure preset '$preset' (see above)" >&2
  exit 1
fi
cmake --build "build/$preset" --target "${@:-all}" </dev/null
