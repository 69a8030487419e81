#!/usr/bin/env bash
# Builds the Python package's wheel for this machine, installs it into an empty virtual environment, and runs mypy over its
# stubs, tests/python and the notebooks there.
#
#   scripts/python_test.sh [ARGUMENT...]   arguments for pytest; WHEEL="--cuda --python PYTHON": those of scripts/wheel.sh;
#                                          PACKAGES="torch jax cupy-cuda13x basedpyright reasoning-gym==0.1.25": packages whose
#                                          tests are skipped otherwise
#
# All files are in build/python*, so that the next build compiles only what has changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1-}" in
  --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
work=build/python
# The flags of build/cpu, so that ccache has its objects.
# shellcheck disable=SC2086  # WHEEL and PACKAGES are lists
CMAKE_ARGS="-DCOHORT_ARCH=native -DCOHORT_STATIC_LIBRARIES=OFF ${CMAKE_ARGS-}" scripts/wheel.sh ${WHEEL-}
wheel=("$work"/wheel/cohort-*.whl)

rm -rf "$work/venv"
"$work"/tools/bin/python -m venv "$work/venv"
# shellcheck disable=SC2086
"$work/venv/bin/pip" install --quiet --disable-pip-version-check "${wheel[0]}" numpy pytest mypy nbclient ipykernel ${PACKAGES-}
"$work/venv/bin/python" -I -m mypy --no-error-summary -p cohort
exec "$work/venv/bin/python" -I -m pytest --quiet -p no:cacheprovider "$@" tests/python
