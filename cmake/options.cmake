# Build options, language settings and warnings.
set(COHORT_CUDA AUTO CACHE STRING "CUDA support: AUTO, ON or OFF")
set_property(CACHE COHORT_CUDA PROPERTY STRINGS AUTO ON OFF)
set(COHORT_ARCH native CACHE STRING "CPU to compile for: native, or x86-64-v3 for a portable binary")
set(COHORT_SANITIZE "" CACHE STRING "Sanitizers: address,undefined or thread; empty for none")
option(COHORT_FUZZ "Build only the fuzz targets of tests/fuzz (clang)" OFF)
option(COHORT_BUILD_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(COHORT_BUILD_BENCH "Build the benchmarks" ${PROJECT_IS_TOP_LEVEL})
option(COHORT_PYTHON "Build the Python package's extension module; needs nanobind in the Python that is found" OFF)

set(COHORT_CUDA_ARCHITECTURES all CACHE STRING "GPUs to compile for: all, or native for those of this machine")
option(COHORT_SPIN_LIMIT "Debug CUDA kernels that hang: one that waits at a barrier for 2 s traps and is named" OFF)
option(COHORT_STATIC_LIBRARIES "Link third-party libraries statically where possible, for a portable binary" OFF)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

# Use ccache if it is installed.
find_program(COHORT_CCACHE ccache)
if(COHORT_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${COHORT_CCACHE})
endif()

# Warnings and code generation of the project's targets.
#  -Werror: only with the compiler of CI; new warnings of other compilers must not break the build.
#  -fopenmp-simd: `#pragma omp simd` requests vector code; no OpenMP library is involved.
#  -ffp-contract=off: fused multiply-adds only where the source calls std::fma, so that results do not depend on
#  the optimiser.
add_library(cohort_options INTERFACE)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  set(COHORT_WERROR_DEFAULT ON)
else()
  set(COHORT_WERROR_DEFAULT OFF)
endif()
option(COHORT_WERROR "Warnings are errors" ${COHORT_WERROR_DEFAULT})
target_compile_options(cohort_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:
  -Wall -Wextra $<$<BOOL:${COHORT_WERROR}>:-Werror> -Wno-missing-field-initializers -ffp-contract=off -fno-math-errno
  -fopenmp-simd -march=${COHORT_ARCH}>)
# g++ 12.2 with AVX-512 copies some 32-byte constants wrongly ({0.5, 0.5, 0, 0} becomes four times 0.5) unless it moves
# constants 16 bytes at a time.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13
    AND CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
  target_compile_options(cohort_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-mmove-max=128 -mstore-max=128>)
endif()
# CMAKE_UNITY_BUILD compiles the sources of a target in groups, in two thirds of the time: for a build that is made
# once, as in CI.
set(CMAKE_UNITY_BUILD_BATCH_SIZE 16)
if(CMAKE_UNITY_BUILD AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(cohort_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-subobject-linkage>)
endif()
# Under the sanitizers -O3 costs more compile time than it saves test time: libraries at -O1; tests at -O0 and without
# -fsanitize=undefined, which takes a third of their compile time.
if(COHORT_SANITIZE)
  string(REPLACE -O3 -O1 CMAKE_CXX_FLAGS_RELEASE "${CMAKE_CXX_FLAGS_RELEASE}")
  target_compile_options(cohort_options INTERFACE -fsanitize=${COHORT_SANITIZE}
    $<IF:$<BOOL:$<TARGET_PROPERTY:COHORT_TEST>>,-fno-sanitize=undefined,-fno-sanitize-recover=undefined> -fno-omit-frame-pointer)
  target_link_options(cohort_options INTERFACE -fsanitize=${COHORT_SANITIZE})
  if(COHORT_FUZZ)
    target_compile_options(cohort_options INTERFACE -fsanitize=fuzzer-no-link)
  endif()
endif()

# CUDA, for any GPU from sm_80 on.
#  --fmad=false: the device equivalent of -ffp-contract=off; kernels call __fmaf_rn or std::fma explicitly.
#  --compress-mode=size: compresses device code to a third of its size; it is unpacked at load time.
if(COHORT_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  find_package(CUDAToolkit 13.0 QUIET)
  find_library(NCCL_LIBRARY nccl HINTS ${CUDAToolkit_LIBRARY_DIR})
  if(CMAKE_CUDA_COMPILER AND CUDAToolkit_FOUND AND NCCL_LIBRARY)
    set(COHORT_CUDA ON)
  else()
    set(COHORT_CUDA OFF)
  endif()
  message(STATUS "CUDA support: ${COHORT_CUDA} (it needs nvcc 13 and NCCL)")
endif()
if(COHORT_CUDA)
  if(NOT CMAKE_CUDA_ARCHITECTURES AND COHORT_CUDA_ARCHITECTURES STREQUAL native)
    execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader OUTPUT_VARIABLE capabilities ERROR_QUIET)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]+" capabilities "${capabilities}")
    list(TRANSFORM capabilities REPLACE "\\.[0-9]+$" "0-real")
    list(REMOVE_DUPLICATES capabilities)
    set(CMAKE_CUDA_ARCHITECTURES ${capabilities})  # empty without a GPU: all
  endif()
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    # 8.6 and 8.9 run the code for 8.0; newer ones than 12.0 translate the PTX.
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100-real 120-real 80-virtual)
  endif()
  # CMake 3.25.1 does not know this flag.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  if(COHORT_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${COHORT_CCACHE})
  endif()
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_EXTENSIONS OFF)
  add_library(cohort_cuda_options INTERFACE)
  target_compile_definitions(cohort_cuda_options INTERFACE $<$<BOOL:${COHORT_SPIN_LIMIT}>:COHORT_SPIN_LIMIT>)
  target_compile_options(cohort_cuda_options INTERFACE
    $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false --expt-relaxed-constexpr -lineinfo --compress-mode=size
      $<$<BOOL:${COHORT_WERROR}>:-Werror=all-warnings> -Xcompiler=-Wall,-Wextra,-Wno-missing-field-initializers,-ffp-contract=off>)
endif()
