# The installed package: the `cohort` command, headers under include/cohort, static libraries, the files of
# find_package(cohort), and the Python helpers in share/cohort.
if(NOT PROJECT_IS_TOP_LEVEL)
  return()
endif()
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(COHORT_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/cohort)

set(COHORT_LAYERS core sys config kernels text data autograd distributed nn rl_engine rl trainers job)
set(COHORT_TARGETS ${COHORT_LAYERS})
list(TRANSFORM COHORT_TARGETS PREPEND cohort_)
foreach(layer IN LISTS COHORT_LAYERS)
  set_target_properties(cohort_${layer} PROPERTIES EXPORT_NAME ${layer})
  if(NOT layer STREQUAL rl_engine)
    install(DIRECTORY ${layer} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/cohort
      FILES_MATCHING PATTERN "*.h" PATTERN "*.cuh")
  endif()
endforeach()
target_compile_features(cohort INTERFACE cxx_std_20)
# Headers contain inline maths, of which the linker keeps one copy: users must compile it with the same flag.
target_compile_options(cohort INTERFACE -ffp-contract=off)

install(TARGETS cohort ${COHORT_TARGETS} EXPORT cohortTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT cohortTargets NAMESPACE cohort:: DESTINATION ${COHORT_CMAKE_DIR})
if(TARGET cohort_cli)
  install(TARGETS cohort_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(PROGRAMS scripts/cohort_reward.py scripts/cohort_environment.py scripts/cohort_sandbox.py
    DESTINATION ${CMAKE_INSTALL_DATADIR}/cohort)
endif()

configure_package_config_file(cmake/cohortConfig.cmake.in ${PROJECT_BINARY_DIR}/cohortConfig.cmake
  INSTALL_DESTINATION ${COHORT_CMAKE_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/cohortConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/cohortConfig.cmake ${PROJECT_BINARY_DIR}/cohortConfigVersion.cmake
  DESTINATION ${COHORT_CMAKE_DIR})
