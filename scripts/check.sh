#!/usr/bin/env bash
# All checks of the source tree that need no build: format, layers, words, sizes, and the list of files. Every check runs,
# whatever the others find.
#   scripts/check.sh [--self-test]     --self-test: also breaks every rule in a temporary tree and expects a report
set -euo pipefail

case "${1-}" in
  "" | --self-test) ;;
  *) echo "usage: scripts/check.sh [--self-test]" >&2; [ "$1" = --help ] && exit 0 || exit 2 ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")"
failed=()
run() { "./$@" || failed+=("$*"); }

run check_format.sh
for check in check_layers.py check_words.py check_sizes.py check_files.py; do
  run "$check"
  [ -z "${1-}" ] || run "$check" --self-test
done
[ ${#failed[@]} = 0 ] || { printf 'failed: scripts/%s\n' "${failed[@]}" >&2; exit 1; }
