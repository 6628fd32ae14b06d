# Compiles for aarch64 on another machine, with Debian's cross compiler. tools/aarch64.sh makes the two folders:
#   -DTORCHRPC_SYSROOT=...   the target's libraries, Python and headers, unpacked; but the C and C++ libraries, which are
#                            the compiler's
#   -DCMAKE_CROSSCOMPILING_EMULATOR=...   what runs programs of the target: ctest, and CMake's look at the target's Python
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES TORCHRPC_SYSROOT)
set(CMAKE_FIND_ROOT_PATH ${TORCHRPC_SYSROOT})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
# torch's libraries need more libraries (of CUDA, say), which only programs that use them need.
set(CMAKE_EXE_LINKER_FLAGS_INIT "-Wl,--allow-shlib-undefined")
