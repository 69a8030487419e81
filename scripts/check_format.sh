#!/usr/bin/env bash
# Checks the format of all C++ and CUDA sources that git does not ignore against .clang-format. To format them:
#   scripts/check_format.sh --fix
set -euo pipefail

mode=(--dry-run -Werror)
case "${1-}" in
  "") ;;
  --fix) mode=(-i) ;;
  *) echo "usage: scripts/check_format.sh [--fix]" >&2; [ "$1" = --help ] && exit 0 || exit 2 ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/.."
formatter=clang-format-14
if ! command -v "$formatter" >/dev/null; then
  formatter=clang-format
  if ! command -v "$formatter" >/dev/null; then
    echo "check_format.sh: clang-format-14 is not installed; scripts/setup.sh --dev installs it" >&2
    exit 1
  fi
  echo "check_format.sh: no clang-format-14, using $($formatter --version); its result may differ" >&2
fi
# Also accept a checkout that belongs to another user, as in a container.
sources() { git -c safe.directory='*' ls-files -z --cached --others --exclude-standard '*.h' '*.cpp' '*.cu' '*.cuh'; }
sources | xargs -0 -r -n 50 "$formatter" "${mode[@]}"
# The formatter does not reflow comments (they contain formulas), so their length is checked here.
long=$(sources | xargs -0 -r awk 'length > 100 && /\/\// { print FILENAME ":" FNR ": a comment beyond column 100" }')
[ -z "$long" ] || { echo "$long" >&2; exit 1; }
