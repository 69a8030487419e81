#!/usr/bin/env bash
# Checks for all build dependencies of Cohort. On Debian 12, Ubuntu 24.04 and newer it installs missing
# packages if it has permission (root or sudo without a password); otherwise it prints the command to
# run and exits with 1. Returns quickly if nothing is missing.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/setup.sh [--dev] [--cuda]

Installs missing packages that Cohort needs to build.

  --dev    also packages for development: ccache, the formatter, and a browser for tests
  --cuda   also checks for CUDA 13 and NCCL, and prints how to install them
  --help   print this text
TEXT
}

dev=no cuda=no
for argument in "$@"; do
  case "$argument" in
    --dev) dev=yes ;;
    --cuda) cuda=yes ;;
    -h | --help) usage; exit 0 ;;
    *) echo "setup.sh: unknown argument '$argument'" >&2; usage >&2; exit 2 ;;
  esac
done

# package:command; a program counts as installed if the command is on PATH.
programs=(cmake:cmake ninja-build:ninja g++:g++ pkg-config:pkg-config python3:python3)
libraries=(libeigen3-dev libspdlog-dev libfmt-dev libyaml-cpp-dev libgtest-dev libcli11-dev
           nlohmann-json3-dev libpcre2-dev libutf8proc-dev libxxhash-dev zlib1g-dev libpng-dev
           libturbojpeg0-dev libcurl4-openssl-dev)
# Optional: ccache for quick rebuilds, the formatter of check_format.sh, and the browser in which tests
# open the page of `cohort report`.
optional=()
if [ "$dev" = yes ]; then
  optional=(ccache:ccache clang-format-14:clang-format-14 clang:clang++ chromium:chromium)
  # Newer systems have no clang-format-14; any clang-format is accepted there.
  if command -v clang-format >/dev/null && ! apt-cache show clang-format-14 >/dev/null 2>&1; then
    optional=(ccache:ccache clang:clang++ chromium:chromium)
  fi
fi

installed() { dpkg-query -W -f '${Status}\n' "$1" 2>/dev/null | grep -q '^install ok installed$'; }

# Appends the packages of list $1 whose command does not exist to list $2.
add_missing_programs() {
  local -n entries=$1 result=$2
  local entry
  for entry in "${entries[@]}"; do
    command -v "${entry#*:}" >/dev/null || result+=("${entry%%:*}")
  done
}

# True if version $1 is at least $2.
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

# CUDA and NCCL come from NVIDIA's repository, which the machine's owner has to add.
check_cuda() {
  local nvcc root version packages=()
  nvcc=$(command -v "${CUDACXX:-nvcc}" || echo /usr/local/cuda/bin/nvcc)
  version=$("$nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p' || true)
  at_least "${version:-0}" 13 || packages+=(cuda-toolkit-13-0)
  root=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
  printf '%s\n' '#include <nccl.h>' 'int main() { return ncclGetVersion(nullptr); }' |
    g++ -x c++ - -o /dev/null -I"$root/include" -L"$root/lib64" -L"$root/lib" -lnccl 2>/dev/null ||
    packages+=(libnccl2 libnccl-dev)
  [ ${#packages[@]} -gt 0 ] || return 0
  cat >&2 <<TEXT
setup.sh: the CUDA build needs CUDA 13 (found: ${version:-none}) and NCCL. From NVIDIA's repository
(https://docs.nvidia.com/cuda/cuda-installation-guide-linux), once its package cuda-keyring is installed:
  sudo apt-get update && sudo apt-get install -y ${packages[*]}
TEXT
  exit 1
}

# Checks the versions of tools. Every successful exit calls this.
check_versions() {
  local cmake_version gxx_version
  cmake_version=$(cmake --version | sed -n '1s/[^0-9]*\([0-9.]*\).*/\1/p')
  gxx_version=$(g++ -dumpfullversion)
  if ! at_least "$cmake_version" 3.25; then
    echo "setup.sh: Cohort needs CMake 3.25 or newer, found $cmake_version (Debian 12 and Ubuntu 24.04 have it)" >&2
    exit 1
  fi
  if [ -z "${CXX-}" ] && ! at_least "$gxx_version" 12; then
    echo "setup.sh: Cohort needs g++ 12 or newer, found $gxx_version; set CXX to use another compiler" >&2
    exit 1
  fi
  if [ "$cuda" = yes ]; then check_cuda; fi
}

missing=() missing_optional=()
add_missing_programs programs missing
add_missing_programs optional missing_optional
if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  if [ ${#missing[@]} -gt 0 ]; then
    echo "setup.sh: this is neither Debian nor Ubuntu; please install the equivalents of: ${missing[*]}" >&2
    exit 1
  fi
  echo "setup.sh: neither Debian nor Ubuntu, cannot check libraries; CMake reports missing ones" >&2
  check_versions
  exit 0
fi
for package in "${libraries[@]}"; do
  installed "$package" || missing+=("$package")
done
# The sanitizers and libFuzzer of clang, a package that clang only recommends.
if [ "$dev" = yes ] && ! installed libclang-rt-dev; then missing_optional+=(libclang-rt-dev); fi
if [ ${#missing[@]} -eq 0 ] && [ ${#missing_optional[@]} -eq 0 ]; then
  check_versions
  exit 0
fi

sudo=()
if [ "$(id -u)" -ne 0 ]; then
  sudo=(sudo -n)
  if ! sudo -n true 2>/dev/null; then
    if [ ${#missing[@]} -gt 0 ]; then
      echo "setup.sh: some packages are missing, and installing them needs a password. Please run" >&2
      echo "  sudo apt-get update && sudo apt-get install -y ${missing[*]}" >&2
      exit 1
    fi
    check_versions
    echo "setup.sh: continuing without ${missing_optional[*]}" >&2
    exit 0
  fi
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
# DEBIAN_FRONTEND is set with env, because sudo removes it from the environment.
apt() {
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 "$@" \
    </dev/null >"$log" 2>&1
}
fail() {
  cat "$log" >&2
  echo "setup.sh: could not install packages (see above). Please run" >&2
  echo "  ${sudo[*]:+sudo }apt-get update && ${sudo[*]:+sudo }apt-get install -y ${missing[*]}" >&2
  exit 1
}

all=("${missing[@]}" "${missing_optional[@]}")
echo "Installing ${all[*]}"
apt update || { [ ${#missing[@]} -eq 0 ] || fail; }
if [ ${#missing[@]} -gt 0 ]; then
  apt install -y --no-install-recommends "${missing[@]}" || fail
fi
for package in "${missing_optional[@]}"; do
  apt install -y --no-install-recommends "$package" && continue
  if [ "$package" = clang-format-14 ] && apt install -y --no-install-recommends clang-format; then
    echo "setup.sh: no clang-format-14 here, installed clang-format; its result may differ" >&2
  else
    echo "setup.sh: could not install $package; continuing without it" >&2
  fi
done
check_versions
