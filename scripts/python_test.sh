#!/usr/bin/env bash
# Builds the Python package's wheel, installs it into an empty virtual environment, and runs tests/python there.
#
#   scripts/python_test.sh [ARGUMENT...]   arguments for pytest; COHORT_CUDA: ON for a CUDA build, PYTHON: the Python (default
#                                          python3)
#
# All files are in build/python, so that the next build compiles only what has changed. The tests of cohort.torch are
# skipped unless PACKAGES names torch (PACKAGES="torch" scripts/python_test.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1-}" in
  --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
work=build/python
python="${PYTHON:-python3}"
export CMAKE_ARGS="${CMAKE_ARGS--DCOHORT_CUDA=OFF}"
tag=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')

# The build's own environment is kept: a new one each time would make CMake compile nanobind again.
tools="$work/tools-$tag"
if [ ! -x "$tools/bin/pip" ]; then
  "$python" -m venv "$tools"
fi
"$tools/bin/pip" install --quiet --disable-pip-version-check 'scikit-build-core>=0.10' 'nanobind>=2.8' mypy numpy
rm -rf "$work/wheel"
"$tools/bin/pip" wheel . --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$work/wheel" \
  --config-settings=build-dir="$work/cmake-$tag" --config-settings=cmake.define.COHORT_CUDA="${COHORT_CUDA:-OFF}"

rm -rf "$work/venv"
"$python" -m venv "$work/venv"
# shellcheck disable=SC2086  # PACKAGES is a list
"$work/venv/bin/pip" install --quiet --disable-pip-version-check "$work"/wheel/cohort-*.whl numpy pytest ${PACKAGES-}
"$tools/bin/mypy" --no-error-summary --python-executable "$work/venv/bin/python" -p cohort
exec "$work/venv/bin/python" -P -m pytest --quiet -p no:cacheprovider "$@" tests/python
