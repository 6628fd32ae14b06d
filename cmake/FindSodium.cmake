# libsodium as a static library of the system's: target Sodium::static.
#
# Static and hidden in our library, as libuv is (FindLibuv.cmake): a process may have another libsodium (PyNaCl's, say).
find_path(Sodium_INCLUDE_DIR sodium.h)
find_library(Sodium_LIBRARY NAMES libsodium.a)
if(NOT Sodium_INCLUDE_DIR OR NOT Sodium_LIBRARY)
  message(FATAL_ERROR
    "libsodium's header or its static library is missing; workers prove with it that they belong to their group. "
    "Install the package libsodium-dev (Debian, Ubuntu) or libsodium-static and libsodium-devel (Fedora), or name "
    "another place with -DSodium_INCLUDE_DIR=... and -DSodium_LIBRARY=.../libsodium.a.")
endif()
mark_as_advanced(Sodium_INCLUDE_DIR Sodium_LIBRARY)

add_library(Sodium::static STATIC IMPORTED)
set_target_properties(Sodium::static PROPERTIES
  IMPORTED_LOCATION ${Sodium_LIBRARY}
  INTERFACE_INCLUDE_DIRECTORIES ${Sodium_INCLUDE_DIR})
