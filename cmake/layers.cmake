# cohort_layer(NAME DEPENDS LAYER...): the static library cohort_NAME from all sources of folder NAME.
function(cohort_layer name)
  cmake_parse_arguments(PARSE_ARGV 1 LAYER "" "" "DEPENDS")
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${name}/*.cpp)
  list(TRANSFORM LAYER_DEPENDS PREPEND cohort_)
  if(NOT sources)
    set(sources ${PROJECT_SOURCE_DIR}/cmake/empty.cpp)
  endif()
  add_library(cohort_${name} STATIC ${sources})
  target_include_directories(cohort_${name} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<INSTALL_INTERFACE:include/cohort>)
  target_link_libraries(cohort_${name} PUBLIC ${LAYER_DEPENDS} PRIVATE $<BUILD_INTERFACE:cohort_options>)
endfunction()
