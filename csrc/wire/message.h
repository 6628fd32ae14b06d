#pragma once

// Messages, which the layers above exchange, and frames, which transports send. PROTOCOL.md, "Frames", specifies the
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

/// The optional parts of a message. A layer adds them to the messages of other layers. Receivers ignore unknown
/// headers. The numbers are part of the wire protocol.
enum class HeaderKind : uint16_t {
  kRRefForks = 1,         ///< the RRefs that this message carries (rref/)
  kAutogradContext = 2,   ///< the distributed autograd context of the message (autograd/)
  kProfiling = 3,         ///< of a request: its name in the profile; of a reply: events of the callee (profiling/)
  kDeadline = 4,          ///< the time that is left until the caller's deadline
  kRRefResult = 5,        ///< the RRef that holds the result of a remote call, and the caller's fork (rref/)
  kAutogradLiveSets = 6,  ///< the autograd contexts that are still alive (autograd/)
  kSharedStorages = 7,    ///< tensors that share their memory (wire/shared_storage.h)
  kDevices = 8,           ///< the source and target devices of its tensors (device/)
  kRepeatable = 9,        ///< the key or number by which the callee recognizes a repeated call (agent/)
  kTraceContext = 10,     ///< the trace of the call (wire/trace_context.h)
  kErrorOrigin = 11,      ///< the origin of an error, if it is not usualOrigin() of the code
  kMetadata = 12,         ///< the program's texts that are sent with a call (wire/metadata.h)
  kLentMemory = 13,       ///< the loans of device memory for its tensors (device/)
  kNoGrad = 14,           ///< the caller has disabled grad in its autograd context (autograd/)
  kExceptionType = 15,    ///< the type of the exception that is the cause of an error
};

struct Header {
  HeaderKind kind;
  std::string bytes;
};

struct Message {
  Kind kind{};
  CallId call = 0;                                 ///< set by the agent; 0 for one-way messages
  std::vector<Header> headers{};                   ///< they are few, so a list is fast enough
  std::string payload{};                           ///< written and read by the layer that owns the kind
  std::vector<at::Tensor> tensors{};               ///< the payload refers to them by index
  WorkerId from = kNoWorker;                       ///< the sender of a received message, by its link; not in the frame
  std::shared_ptr<const Repetition> repetition{};  ///< how the agent repeats it, may be null; not in the frame

  /// Returns the bytes of the first header of that kind; nullptr if there is none.
  const std::string* header(HeaderKind kind) const;
  /// Replaces the bytes of the header of that kind, or adds the header.
  void setHeader(HeaderKind kind, std::string bytes);
  /// Returns the number of bytes of all elements of its tensors.
  size_t tensorBytes() const;
  /// Returns the number of bytes of the message, roughly: without its headers.
  size_t bytes() const { return payload.size() + tensorBytes(); }
};

/// The data of one large tensor, beside the head of a frame.
struct Segment {
  c10::Storage storage;
  size_t offset = 0;
  size_t bytes = 0;
  bool is_shared = false;  ///< of a received frame: whether the sender can still write to this memory

  const void* data() const { return static_cast<const char*>(storage.data()) + offset; }
  void* mutableData() const { return static_cast<char*>(storage.mutable_data()) + offset; }
};

/// The unit that a transport sends: a head, and the data of the tensors that are too large for the head. In a received
/// frame, nothing else refers to the storages of the segments.
struct Frame {
  std::string head;
  std::vector<Segment> segments;
  std::shared_ptr<const Error> failure;  ///< of a received frame: why its segments are missing; usually null
};

/// The data of tensors of at most this size is in the head; that of a larger tensor is a segment.
constexpr size_t kInlineTensorBytes = 4096;

/// Serializes a message. Tensors keep dtype, sizes, requires_grad, the conjugate and negative bits, and strides (unless
/// most of their memory range belongs to no element). Sparse tensors are sent as their parts. Segments of dense tensors
/// share the memory of the tensors. Throws Error: kSerialization for a tensor that cannot be sent, kFrameTooLarge.
Frame encodeFrame(const Message& message, const Limits& limits = {});

/// Deserializes a frame. Tensors share the memory of their segments. An exception are tensors whose contents are
/// checked (the indices of sparse tensors): they are copied first if the sender could change them after the check.
/// Throws Error(kProtocol) for bytes that encodeFrame() could not have made. Never reads out of bounds. Allocates
/// memory at most in proportion to the size of the frame.
Message decodeFrame(Frame&& frame, const Limits& limits = {});

/// Copies the segments to which the sender can still write, so that the sender can no longer change the frame.
void copySharedSegments(Frame& frame);

/// The fields of a head that the loop thread reads without decoding the rest.
struct FrameInfo {
  Kind kind{};
  CallId call = 0;
};
std::optional<FrameInfo> peekFrame(std::string_view head);

/// As encodeFrame(), but the segments are copies, as in a received frame. For calls of a worker to itself.
Frame encodeCopy(const Message& message, const Limits& limits = {});

/// Returns a deep copy, equal to the message that a receiver would decode. For calls of a worker to itself, for
/// example.
Message copyMessage(const Message& message);

/// Returns the kError reply for an error.
Message encodeError(const Error& error);
/// Returns the error in a kError reply. Throws Error(kProtocol) for malformed bytes.
Error decodeError(const Message& message);
/// Writes an error to another payload, and reads it.
void write(const Error& error, Writer& out);
Error readError(Reader& in);

}  // namespace torchrpc
