#pragma once

// Whether bytes are UTF-8: for texts that go to Python or into files.
// Threads: any.

#include <cstddef>
#include <string_view>

namespace torchrpc {

/// The number of bytes of the character at the start of `text`, which is not empty; 0 if there is no valid character.
size_t utf8Size(std::string_view text);
/// The number of bytes before the first that is not part of a valid character; text.size() if all are.
size_t validUtf8(std::string_view text);

}  // namespace torchrpc
