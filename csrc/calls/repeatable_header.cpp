#include "calls/repeatable_header.h"

#include <bit>
#include <cstring>
#include <string_view>

#include "base/repetition.h"
#include "wire/codec.h"

namespace torchrpc {

namespace {

/// A running 64-bit hash of bytes, eight at a time.
class Digest {
 public:
  void add(uint64_t word) { state_ = std::rotl((state_ ^ word) * 0x9E3779B97F4A7C15ull, 29) ^ (state_ >> 32); }
  void add(const void* data, size_t size) {
    add(size);
    const auto* bytes = static_cast<const char*>(data);
    for (; size >= sizeof(uint64_t); bytes += sizeof(uint64_t), size -= sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, bytes, sizeof(word));
      add(word);
    }
    uint64_t rest = 0;
    if (size > 0) std::memcpy(&rest, bytes, size);
    add(rest);
  }
  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return add(0);
    add(static_cast<uint64_t>(tensor.scalar_type()));
    for (const auto size : tensor.sizes()) add(static_cast<uint64_t>(size));
    // Other tensors count only by their type and sizes.
    if (!tensor.is_cpu() || tensor.layout() != at::kStrided) return;
    const auto dense = tensor.detach().contiguous();
    add(dense.const_data_ptr(), dense.nbytes());
  }
  uint64_t value() const { return state_ == 0 ? 1 : state_; }

 private:
  uint64_t state_ = 0x243F6A8885A308D3ull;
};

}  // namespace

std::string RepeatableHeader::encode() const {
  std::string bytes;
  Writer writer(bytes);
  writer.putString(key);
  writer.put(number);
  writer.put(oldest);
  writer.put(incarnation);
  writer.put(digest);
  writer.put(attempt);
  return bytes;
}

RepeatableHeader RepeatableHeader::decode(const std::string& bytes) {
  Reader reader(bytes);
  RepeatableHeader header;
  header.key = reader.getString();
  header.number = reader.get<uint64_t>();
  header.oldest = reader.get<uint64_t>();
  header.incarnation = reader.get<uint64_t>();
  header.digest = reader.get<uint64_t>();
  header.attempt = reader.get<uint32_t>();
  reader.expectEnd();
  const bool has_key = !header.key.empty();
  if (header.key.size() > kMaxKeyBytes || has_key == (header.number != 0) || header.attempt == 0 ||
      (!has_key && header.number < header.oldest)) {
    throw Error(ErrorCode::kProtocol, "malformed message: a header Repeatable that no worker writes");
  }
  return header;
}

uint64_t digestOf(const Message& call) {
  Digest digest;
  digest.add(static_cast<uint64_t>(call.kind));
  digest.add(call.payload.data(), call.payload.size());
  for (const auto& tensor : call.tensors) digest.add(tensor);
  return digest.value();
}

}  // namespace torchrpc
