#!/usr/bin/env bash
# Builds a preset in a new folder without ccache and prints how long that took and which files took longest.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/build_times.sh [PRESET] [-DNAME=VALUE...] [TARGET...]

Builds a preset (default cpu) in a new folder, without ccache, as scripts/quickstart.sh and scripts/test.sh do, and prints
the seconds of the whole build, of each target and of the slowest files. Those of files add up to more than the build
took, since several are compiled at a time.

Examples:
  scripts/build_times.sh cpu cohort_cli                            what scripts/quickstart.sh builds
  scripts/build_times.sh cpu                                       what scripts/test.sh builds
  scripts/build_times.sh cuda -DCMAKE_CUDA_ARCHITECTURES=90-real   the kernels for one architecture
TEXT
}

case "${1-}" in -h | --help) usage; exit 0 ;; esac
preset=cpu variables=(-DCMAKE_UNITY_BUILD=ON)
if [ $# -gt 0 ] && [[ $1 != -* ]]; then
  preset=$1
  shift
fi
while [[ ${1-} == -* ]]; do
  [[ $1 == -D* ]] || { usage >&2; exit 2; }
  variables+=("$1")
  shift
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export CCACHE_DISABLE=1
[ -n "${CUDACXX-}" ] || ! [ -x /usr/local/cuda/bin/nvcc ] || export CUDACXX=/usr/local/cuda/bin/nvcc

start=$SECONDS
cmake --preset "$preset" -B "$folder" "${variables[@]}" >"$folder/configure.log" || { cat "$folder/configure.log" >&2; exit 1; }
cmake --build "$folder" --target "${@:-all}" >"$folder/build.log" || { tail -n 30 "$folder/build.log" >&2; exit 1; }
seconds=$((SECONDS - start))
# A line of .ninja_log: start and end in ms, time stamp, output, hash.
awk -F '\t' '/^#/ { next }
  { s = ($2 - $1) / 1000; file[$4] = s; all += s; name = $4; sub(/^.*CMakeFiles\//, "", name); sub(/\.dir\/.*/, "", name); target[name] += s }
  END {
    for (f in file) printf "%8.1f s  %s\n", file[f], f | "sort -rn | head -n 20"
    close("sort -rn | head -n 20")
    print "targets:"
    for (t in target) printf "%8.1f s  %s\n", target[t], t | "sort -rn | head -n 20"
    close("sort -rn | head -n 20")
    printf "%8.1f s of compiler and linker time\n", all
  }' "$folder/.ninja_log"
printf '%6d   s for the build of preset %s on %d cores\n' "$seconds" "$preset" "$(nproc)"
