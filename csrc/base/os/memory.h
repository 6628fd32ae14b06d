#pragma once

// Memory that processes share, and hints about pages. On systems without sealed files (memfd) no memory is shared:
// openSharedMemory() fails there, and workers use TCP only.
// Threads: any.

#include <cstddef>
#include <span>
#include <string_view>

namespace torchrpc::os {

/// The descriptor of a new, empty file in memory (memfd_create), closed on exec; -1 with errno if there is none.
int openSharedMemory();
/// The descriptor of a file of that name in memory with these contents, which nobody can change; -1 with errno if there
/// is none. Processes of the same user find it in /proc/PID/fd, where its target is "/memfd:NAME (deleted)".
int openSealedFile(const char* name, std::string_view contents);
/// Gives the file of openSharedMemory() a size, and seals it: no process can change the size any more.
bool setSizeAndSeal(int fd, size_t bytes);
/// Whether the file is sealed as by setSizeAndSeal().
bool isSealed(int fd);
/// Frees the physical memory of whole pages of a shared mapping (MADV_REMOVE). Their bytes become zero.
bool discardSharedPages(std::span<char> memory);
/// Moves a private mapping to the place of another one of the same size (mremap). Async-signal-safe.
bool moveMapping(void* from, size_t bytes, void* to);
/// Asks for huge pages (MADV_HUGEPAGE). It has no effect where they are disabled or do not exist.
void requestHugePages(void* memory, size_t bytes);

}  // namespace torchrpc::os
