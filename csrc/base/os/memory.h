#pragma once

// Memory that processes share, and hints about pages. Without sealed files (memfd, Linux only) no memory is shared:
// openSharedMemory() fails, and workers use TCP only.
// Threads: any.

#include <cstddef>
#include <span>
#include <string_view>

namespace torchrpc::os {

/// Returns the descriptor of a new, empty file in memory (memfd_create), closed on exec; -1 with errno on failure.
int openSharedMemory();
/// Returns the descriptor of a new file in memory with this name and these contents, which no process can change; -1
/// with errno on failure. Processes of the same user find it in /proc/PID/fd, as a link to "/memfd:NAME (deleted)".
int openSealedFile(const char* name, std::string_view contents);
/// Sets the size of a file of openSharedMemory() and seals it, so that no process can change the size later. Returns
/// false on failure.
bool setSizeAndSeal(int fd, size_t bytes);
/// Whether the file is sealed as by setSizeAndSeal().
bool isSealed(int fd);
/// Frees the physical memory of whole pages of a shared mapping (MADV_REMOVE). Their bytes become zero.
bool discardSharedPages(std::span<char> memory);
/// Moves a private mapping to the place of another one of the same size (mremap). Async-signal-safe.
bool moveMapping(void* from, size_t bytes, void* to);
/// Requests huge pages (MADV_HUGEPAGE). It has no effect where they are disabled or do not exist.
void requestHugePages(void* memory, size_t bytes);

}  // namespace torchrpc::os
