#pragma once

// Whether the tests run under a sanitizer, which slows them and replaces malloc.

namespace torchrpc::test {

#if defined(__has_feature)
constexpr bool kIsSanitized = __has_feature(thread_sanitizer) || __has_feature(address_sanitizer);
#else
constexpr bool kIsSanitized = false;
#endif

}  // namespace torchrpc::test
