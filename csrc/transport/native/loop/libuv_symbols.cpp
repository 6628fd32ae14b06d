// Symbols for linking a static libuv that was compiled for programs (as Debian's is) into a shared library.
//
// Such objects access variables of the C library by relative addresses that are only valid within one linked file.
// libuv uses three such variables. The linker's --wrap replaces them by these (csrc/CMakeLists.txt). libuv only reads
// the third: the others serve sockets and processes that libuv opens itself, which torchrpc never requests.

#include <cstdio>
#include <netinet/in.h>

extern "C" {

extern FILE* __real_stderr;

extern __attribute__((visibility("hidden"))) const in6_addr __wrap_in6addr_any;
const in6_addr __wrap_in6addr_any = IN6ADDR_ANY_INIT;
__attribute__((visibility("hidden"))) char** __wrap_environ = nullptr;
__attribute__((visibility("hidden"))) FILE* __wrap_stderr = __real_stderr;
}
