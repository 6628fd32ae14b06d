# The headers of UCX, for the optional transport over it: target Ucx::headers. They are the system's, or those of the
# package libucx of the chosen Python. The libraries are looked for at run time (csrc/transport/ucx/libucp.h).
set(TORCHRPC_UCX_INCLUDE "" CACHE PATH "The folder with ucp/api/ucp.h; empty: the system's or the Python package's")

execute_process(
  COMMAND ${Python_EXECUTABLE} -c
          "import importlib.util as u, os; print(os.path.join(u.find_spec('libucx').submodule_search_locations[0], 'include'))"
  OUTPUT_VARIABLE package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
# Looked for at each configuration: the package may have been installed since the last.
unset(Ucx_INCLUDE_DIR CACHE)
if(TORCHRPC_UCX_INCLUDE)
  find_path(Ucx_INCLUDE_DIR ucp/api/ucp.h PATHS ${TORCHRPC_UCX_INCLUDE} NO_DEFAULT_PATH NO_CMAKE_FIND_ROOT_PATH)
else()
  find_path(Ucx_INCLUDE_DIR ucp/api/ucp.h)
  if(NOT Ucx_INCLUDE_DIR AND package)
    find_path(Ucx_INCLUDE_DIR ucp/api/ucp.h PATHS ${package} NO_DEFAULT_PATH NO_CMAKE_FIND_ROOT_PATH)
  endif()
endif()
mark_as_advanced(Ucx_INCLUDE_DIR)

if(Ucx_INCLUDE_DIR)
  set(Ucx_FOUND TRUE)
  message(STATUS "UCX headers: ${Ucx_INCLUDE_DIR}")
  add_library(Ucx::headers INTERFACE IMPORTED)
  set_target_properties(Ucx::headers PROPERTIES INTERFACE_INCLUDE_DIRECTORIES ${Ucx_INCLUDE_DIR})
elseif(TORCHRPC_UCX_INCLUDE)
  message(FATAL_ERROR "${TORCHRPC_UCX_INCLUDE} has no ucp/api/ucp.h: name another folder with -DTORCHRPC_UCX_INCLUDE=...")
else()
  set(Ucx_FOUND FALSE)
  message(STATUS
    "No transport over UCX: its headers are missing (the Python package libucx-cu12 or libucx-cu13, or libucx-dev on "
    "Debian and Ubuntu)")
endif()
