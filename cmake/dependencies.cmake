# Third-party libraries, all available as Debian or Ubuntu packages (scripts/quickstart.sh installs them).
find_package(Threads REQUIRED)
find_package(Eigen3 3.4 REQUIRED NO_MODULE)
find_package(spdlog REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(ZLIB REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(pcre2 REQUIRED IMPORTED_TARGET libpcre2-8)
pkg_check_modules(xxhash REQUIRED IMPORTED_TARGET libxxhash)
pkg_check_modules(png REQUIRED IMPORTED_TARGET libpng)
pkg_check_modules(turbojpeg REQUIRED IMPORTED_TARGET libturbojpeg)
# Only its header: sys/http.cpp opens the library when it is first used.
find_path(CURL_INCLUDE_DIR curl/curl.h REQUIRED)

set(COHORT_SPDLOG spdlog::spdlog)
set(COHORT_YAML_CPP yaml-cpp)
if(TARGET yaml-cpp::yaml-cpp)
  set(COHORT_YAML_CPP yaml-cpp::yaml-cpp)
endif()
set(COHORT_PCRE2 PkgConfig::pcre2)
set(COHORT_ZLIB ZLIB::ZLIB)
set(COHORT_IMAGES PkgConfig::png PkgConfig::turbojpeg)
# Always the static archive, so that the binary needs no additional package at run time.
find_library(UTF8PROC_ARCHIVE libutf8proc.a REQUIRED)

# For a portable binary: static archives instead of shared libraries. Debian has none for spdlog and fmt, so
# core/log.cpp compiles them header-only.
if(COHORT_STATIC_LIBRARIES)
  add_library(cohort_spdlog INTERFACE)
  target_compile_definitions(cohort_spdlog INTERFACE SPDLOG_HEADER_ONLY SPDLOG_FMT_EXTERNAL FMT_HEADER_ONLY)
  set(COHORT_SPDLOG $<BUILD_INTERFACE:cohort_spdlog>)
  # As paths, which an installed package can also refer to.
  find_library(PCRE2_ARCHIVE libpcre2-8.a REQUIRED)
  set(COHORT_PCRE2 ${PCRE2_ARCHIVE})
  if(NOT COHORT_PYTHON)  # Debian's archives of these are not position-independent
    find_library(YAML_CPP_ARCHIVE libyaml-cpp.a REQUIRED)
    set(COHORT_YAML_CPP ${YAML_CPP_ARCHIVE})
    find_library(ZLIB_ARCHIVE libz.a REQUIRED)
    set(COHORT_ZLIB ${ZLIB_ARCHIVE})
    find_library(PNG_ARCHIVE libpng.a REQUIRED)
    find_library(TURBOJPEG_ARCHIVE libturbojpeg.a REQUIRED)
    set(COHORT_IMAGES ${PNG_ARCHIVE} ${ZLIB_ARCHIVE} ${TURBOJPEG_ARCHIVE})
  endif()
endif()

if(COHORT_CUDA)
  find_package(CUDAToolkit 13.0 REQUIRED)
  find_library(NCCL_LIBRARY nccl HINTS ${CUDAToolkit_LIBRARY_DIR} REQUIRED)
  find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS} REQUIRED)
endif()
