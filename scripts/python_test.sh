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
# The flags of build/cpu, so that ccache has its objects.
CMAKE_ARGS="-DCOHORT_ARCH=native -DCOHORT_STATIC_LIBRARIES=OFF ${CMAKE_ARGS-}" scripts/wheel.sh --python "$python" ${WHEEL-}

rm -rf "$work/venv"
"$python" -m venv "$work/venv"
# shellcheck disable=SC2086  # PACKAGES is a list
"$work/venv/bin/pip" install --quiet --disable-pip-version-check "$work"/wheel/cohort-*.whl numpy pytest ${PACKAGES-}
"$work"/tools-*/bin/mypy --no-error-summary --python-executable "$work/venv/bin/python" -p cohort
exec "$work/venv/bin/python" -P -m pytest --quiet -p no:cacheprovider "$@" tests/python
