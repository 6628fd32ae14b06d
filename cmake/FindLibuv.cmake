# libuv as a static library of the system's: target Libuv::static.
#
# Static, because LibTorch exports the symbols of a copy of its own: ours must be bound inside our library, where they are
# hidden (see csrc/CMakeLists.txt).
find_path(Libuv_INCLUDE_DIR uv.h)
find_library(Libuv_LIBRARY NAMES uv_a libuv_a.a libuv.a)
if(NOT Libuv_INCLUDE_DIR OR NOT Libuv_LIBRARY)
  message(FATAL_ERROR
    "libuv's header or its static library is missing; the native transport is made of it. Install the package "
    "libuv1-dev (Debian, Ubuntu) or libuv-static and libuv-devel (Fedora), or name another place with "
    "-DLibuv_INCLUDE_DIR=... and -DLibuv_LIBRARY=.../libuv_a.a.")
endif()
mark_as_advanced(Libuv_INCLUDE_DIR Libuv_LIBRARY)

add_library(Libuv::static STATIC IMPORTED)
set_target_properties(Libuv::static PROPERTIES
  IMPORTED_LOCATION ${Libuv_LIBRARY}
  INTERFACE_INCLUDE_DIRECTORIES ${Libuv_INCLUDE_DIR}
  INTERFACE_LINK_LIBRARIES "Threads::Threads;${CMAKE_DL_LIBS}")
