# Compiles through ccache where there is one.
find_program(CCACHE ccache)
if(CCACHE)
  # A precompiled header's macros and time stamps do not matter, and nor does where the tree lies.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${CCACHE})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options(-fpch-preprocess)  # else ccache passes over every file that uses a precompiled header
  endif()
endif()
