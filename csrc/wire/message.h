#pragma once

// Messages, as the layers above see them, and frames, as transports see them. PROTOCOL.md, "Frames", specifies the
// bytes.

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/ids.h"
#include "base/repetition.h"
#include "base/result.h"
#include "wire/kinds.h"
#include "wire/limits.h"

namespace torchrpc {

class Reader;
class Writer;

/// Optional parts of a message, which a layer adds to the messages of other layers. Readers ignore unknown headers. The
/// numbers are part of the wire protocol.
enum class HeaderKind : uint16_t {
  kRRefForks = 1,         ///< the RRefs that this message carries (rref/)
  kAutogradContext = 2,   ///< the distributed autograd context of the message (autograd/)
  kProfiling = 3,         ///< how a profile shows a call, and the events it asks the callee for (profiling/)
  kDeadline = 4,          ///< the time that is left until the caller's deadline
  kRRefResult = 5,        ///< the ids of the RRef that holds the result of a remote call (rref/)
  kAutogradLiveSets = 6,  ///< which autograd contexts are still alive (autograd/)
  kSharedStorages = 7,    ///< tensors that share their memory (wire/shared_storage.h)
  kDevices = 8,           ///< on which devices its tensors were, and go to (device/)
  kRepeatable = 9,        ///< by what the callee recognizes a call that arrives again (agent/)
  kTraceContext = 10,     ///< the trace that the call belongs to (wire/trace_context.h)
  kErrorOrigin = 11,      ///< where an error has happened, if its code does not say it
  kMetadata = 12,         ///< the program's texts that travel with a call (wire/metadata.h)
  kLentMemory = 13,       ///< where the sender's devices have the data of its tensors (device/)
};

struct Header {
  HeaderKind kind;
  std::string bytes;
};

struct Message {
  Kind kind{};
  CallId call = 0;                    ///< set by the agent; 0 for one-way messages
  std::vector<Header> headers{};      ///< few, so a list is fast enough
  std::string payload{};              ///< written and read by the layer that owns the kind
  std::vector<at::Tensor> tensors{};  ///< the payload refers to them by index
  WorkerId from = kNoWorker;          ///< the worker from which it has arrived, as its link says; not among the bytes
  std::shared_ptr<const Repetition> repetition{};  ///< how the agent repeats it; null: not; not among the bytes

  /// The bytes of the first header of that kind; nullptr if there is none.
  const std::string* header(HeaderKind kind) const;
  /// Replaces the bytes of that header, or adds it.
  void setHeader(HeaderKind kind, std::string bytes);
  /// The bytes of all elements of its tensors.
  size_t tensorBytes() const;
};

/// The data of one large tensor, beside the head of a frame.
struct Segment {
  c10::Storage storage;
  size_t offset = 0;
  size_t bytes = 0;
  bool is_shared = false;  ///< of a frame that has arrived: the sender can still write to this memory

  const void* data() const { return static_cast<const char*>(storage.data()) + offset; }
  void* mutableData() const { return static_cast<char*>(storage.mutable_data()) + offset; }
};

/// The unit that a transport sends: a head, and the data of the tensors that are too large for the head. On arrival
/// each segment has a storage to which nothing else refers.
struct Frame {
  std::string head;
  std::vector<Segment> segments;
  std::shared_ptr<const Error> failure;  ///< of a frame that has arrived: why there are no segments; seldom set
};

/// The data of tensors of at most this size is in the head; that of a larger tensor is a segment.
constexpr size_t kInlineTensorBytes = 4096;

/// Serializes a message. Tensors keep dtype, sizes, requires_grad, the conjugate and negative bits, and strides (unless
/// most of their memory range belongs to no element); sparse tensors are sent as their parts. Segments of dense tensors
/// share the memory of the tensors. Throws Error: kSerialization for a tensor that cannot be sent, kFrameTooLarge.
Frame encodeFrame(const Message& message, const Limits& limits = {});

/// The reverse. Tensors share the memory of their segments, except those whose contents are checked (the indices of
/// sparse tensors), which are copied first if the sender could change them afterwards. Throws Error(kProtocol) for
/// bytes that encodeFrame could not have made. Never reads out of bounds, and never allocates more than in proportion
/// to the size of the frame.
Message decodeFrame(Frame frame, const Limits& limits = {});

/// Copies the segments to which the sender can still write, so that nothing in the frame changes any more.
void copySharedSegments(Frame& frame);

/// The fields that the loop thread reads from the first bytes of a head, without decoding the rest.
struct FrameInfo {
  Kind kind{};
  CallId call = 0;
};
std::optional<FrameInfo> peekFrame(std::string_view head);

/// As encodeFrame, but the segments are copies, as in a frame that has arrived. For calls to the same worker.
Frame encodeCopy(const Message& message, const Limits& limits = {});

/// A deep copy, equal to the result of sending the message. For calls to the same worker.
Message copyMessage(const Message& message);

/// Makes the kError reply for an error.
Message encodeError(const Error& error);
/// Reads the error in a kError reply. Throws Error(kProtocol) for malformed bytes.
Error decodeError(const Message& message);
/// Write and read an error within another payload.
void write(const Error& error, Writer& out);
Error readError(Reader& in);

}  // namespace torchrpc
