#!/usr/bin/env bash
# From a fresh checkout to a small training run, on the CPU or a GPU: installs missing packages,
# builds the `cohort` command and trains configs/demo.yaml. Running it again repeats only missing steps.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/quickstart.sh [--gpu] [--seed N]

Installs missing packages, builds the cohort command and trains configs/demo.yaml.

  --gpu      on an NVIDIA GPU; needs CUDA 13 and NCCL, and prints how to install them
  --seed N   seed of the run, a whole number from 0 (default 0)
  --help     print this text
TEXT
}
bad_usage() {
  echo "quickstart.sh: $1" >&2
  usage >&2
  exit 2
}

seed=0 preset=cpu device=cpu
while [ $# -gt 0 ]; do
  case "$1" in
    --gpu) preset=cuda device=cuda; shift ;;
    --seed) [ $# -ge 2 ] || bad_usage "--seed needs a number"; seed=$2; shift 2 ;;
    --seed=*) seed=${1#--seed=}; shift ;;
    -h | --help) usage; exit 0 ;;
    *) bad_usage "unknown argument '$1'" ;;
  esac
done
[[ $seed =~ ^[0-9]{1,18}$ ]] || bad_usage "--seed: expected a whole number from 0, got '$seed'"

cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh $([ $preset != cuda ] || echo --cuda)
echo "Building (the first time takes a few minutes)"
scripts/build.sh $preset --grouped cohort_cli
exec build/$preset/cohort train configs/demo.yaml "seed=$seed" "device=$device"
