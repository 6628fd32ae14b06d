#include "wire/callable_name.h"

#include <algorithm>
#include <cstring>

#include "wire/codec.h"

namespace torchrpc {

namespace {

/// Reads the strings of a payload that may be cut off.
class NameReader {
 public:
  explicit NameReader(std::string_view payload) : reader_(payload) {}

  void skip(size_t bytes) { reader_.getBytes(bytes); }
  bool isCut() const { return is_cut_; }

  /// Returns the next string, or what is left of it: then isCut() returns true.
  std::string_view next() {
    const auto size = reader_.get<uint64_t>();
    is_cut_ = size > reader_.remaining();
    return reader_.getBytes(std::min<uint64_t>(size, reader_.remaining()));
  }

 private:
  Reader reader_;
  bool is_cut_ = false;
};

}  // namespace

std::string callableName(Kind kind, std::string_view payload) try {
  if (!isCall(kind)) return {};
  const bool is_python = traitsOf(kind).callable == CallableType::kPython;
  NameReader in(payload);
  if (is_python) in.skip(2);  // the form, and whether the function returns a future
  std::string out(in.next());
  if (is_python && !in.isCut()) {
    const auto name = in.next();
    if (!out.empty() && !name.empty()) out += '.';
    out += name;
  }
  if (in.isCut()) out += "...";
  // Terminals and logs show the name, and a peer has written it: control characters are replaced.
  std::ranges::replace_if(out, [](unsigned char c) { return c < ' ' || c == 0x7f; }, '?');
  return out;
} catch (const Error&) {
  return {};
}

std::string callableOrKindName(Kind kind, std::string_view payload) {
  auto out = callableName(kind, payload);
  return out.empty() ? std::string(name(kind)) : out;
}

std::string_view callableNameBytes(Kind kind, std::string_view payload) {
  if (!isCall(kind)) return {};
  const bool is_python = traitsOf(kind).callable == CallableType::kPython;
  const auto all = payload.substr(0, kCallableNameBytes);
  uint64_t end = is_python ? 2 : 0;
  for (int strings = is_python ? 2 : 1; strings > 0; --strings) {
    if (all.size() < end + sizeof(uint64_t)) return all;
    uint64_t size = 0;
    std::memcpy(&size, all.data() + end, sizeof(size));
    end += sizeof(size);
    if (size > all.size() - end) return all;
    end += size;
  }
  return all.substr(0, end);
}

}  // namespace torchrpc
