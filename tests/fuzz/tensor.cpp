// One tensor: its description and its data, in the head or beside it.

#include <c10/util/Exception.h>

#include <cstring>
#include <span>

#include "input.h"
#include "wire/tensor_codec.h"

using namespace torchrpc;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  auto owned = input.segments();
  const auto sent = owned;
  std::span<Segment> segments(owned);
  Reader head(input.rest());
  const auto limits = fuzz::limits();
  at::Tensor tensor;
  try {
    tensor = decodeTensor(head, segments, limits);
  } catch (const Error& error) {
    fuzz::expectRefusal(error);
    return 0;
  } catch (const c10::Error&) {
    return 0;  // part of the contract: torch refuses the tensor
  }
  // The sender can still write to these, which must not change what has been checked.
  for (const auto& segment : sent) {
    if (segment.is_shared && segment.bytes > 0) std::memset(segment.mutableData(), 0x7f, segment.bytes);
  }
  // A decoded tensor can be encoded, which reads all of its memory.
  std::string bytes;
  std::vector<Segment> out;
  Writer writer(bytes);
  encodeTensor(tensor, writer, out, Limits());
  if (!tensor.defined() || tensor.layout() == at::kStrided) return 0;
  segments = out;
  Reader again(bytes);
  decodeTensor(again, segments, Limits());  // throws, which ends the program, if the indices are not valid any more
  return 0;
}
