// What lets a static libuv that was compiled for programs (Debian's is) become part of a shared library.
//
// Such objects reach the C library's variables by distances that only hold within one file, and libuv has three. The
// linker's --wrap gives it these instead (csrc/CMakeLists.txt). Only the third is ever looked at: the others belong to
// sockets and processes that libuv would open by itself, which nobody asks it to.

#include <cstdio>
#include <netinet/in.h>

extern "C" {

extern FILE* __real_stderr;

extern __attribute__((visibility("hidden"))) const in6_addr __wrap_in6addr_any;
const in6_addr __wrap_in6addr_any = IN6ADDR_ANY_INIT;
__attribute__((visibility("hidden"))) char** __wrap_environ = nullptr;
__attribute__((visibility("hidden"))) FILE* __wrap_stderr = __real_stderr;
}
