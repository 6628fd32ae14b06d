#pragma once

// A message as the layers above the wire see it, and the frame it becomes. PROTOCOL.md has the bytes.

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/ids.h"
#include "base/result.h"
#include "wire/kinds.h"
#include "wire/limits.h"

namespace torchrpc {

class Reader;
class Writer;

/// Optional parts of a message that a layer other than the one that made it adds and reads.
/// Unknown ones are passed over. The numbers are part of the wire protocol.
enum class HeaderKind : uint16_t {
  kRRefForks = 1,         ///< the RRefs that travel in this message (rref/)
  kAutogradContext = 2,   ///< the distributed autograd context it belongs to (autograd/)
  kProfiling = 3,         ///< how profiles show a call, and what they want of the callee (profiling/)
  kDeadline = 4,          ///< what is left of the caller's time
  kRRefResult = 5,        ///< the ids of the RRef that a remote call's result becomes (rref/)
  kAutogradLiveSets = 6,  ///< which autograd contexts are still alive (autograd/)
};

struct Header {
  HeaderKind kind;
  std::string bytes;
};

struct Message {
  Kind kind{};
  CallId call = 0;                    ///< set by the agent; 0 for one-way messages
  std::vector<Header> headers{};      ///< few, so a list
  std::string payload{};              ///< made and read by whoever owns the kind
  std::vector<at::Tensor> tensors{};  ///< the payload refers to them by index

  /// The bytes of the first header of that kind, or nullptr.
  const std::string* header(HeaderKind kind) const;
};

/// A piece of memory that travels beside the head of a frame.
struct Segment {
  c10::Storage storage;
  size_t offset = 0;
  size_t bytes = 0;

  const void* data() const { return static_cast<const char*>(storage.data()) + offset; }
  void* mutableData() const { return static_cast<char*>(storage.mutable_data()) + offset; }
};

/// What a transport moves: a head, and the data of the tensors that are too large to stand in it.
/// On arrival each segment is a storage of its own that nothing else refers to.
struct Frame {
  std::string head;
  std::vector<Segment> segments;
};

/// Tensors of at most this many bytes stand in the head; larger ones are segments of their own.
constexpr size_t kInlineTensorBytes = 4096;

/// Serialises a message. Tensors keep dtype, sizes, strides (unless most of their range is not theirs), requires_grad
/// and the conjugate and negative bits; sparse ones go as their parts. Segments share memory with the tensors (no copy)
/// wherever a tensor is dense. Throws Error: kSerialization for a tensor that cannot travel, kFrameTooLarge.
Frame encodeFrame(const Message& message, const Limits& limits = {});

/// The reverse; tensors that came as segments share their memory. Throws Error(kProtocol) on any bytes that
/// encodeFrame could not have made; never reads out of bounds, never allocates more than the frame's own size
/// justifies.
Message decodeFrame(Frame frame, const Limits& limits = {});

/// The first bytes of any head, readable without decoding the rest: what the loop thread looks at.
struct FrameInfo {
  Kind kind{};
  CallId call = 0;
};
std::optional<FrameInfo> peekFrame(std::string_view head);

/// As encodeFrame, with segments of its own: as if it had arrived, for calls to oneself.
Frame encodeCopy(const Message& message, const Limits& limits = {});

/// A deep copy, as a round trip over the wire would give: for calls to oneself.
Message copyMessage(const Message& message);

/// Builds the kError reply of an error, and reads one.
Message encodeError(const Error& error);
/// Throws Error(kProtocol) on malformed bytes.
Error decodeError(const Message& message);
/// The same within another payload.
void write(const Error& error, Writer& out);
Error readError(Reader& in);

}  // namespace torchrpc
