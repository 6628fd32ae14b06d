// One tensor: its description and its data, in the head or beside it.

#include <c10/util/Exception.h>

#include <span>

#include "input.h"
#include "wire/tensor_codec.h"

using namespace torchrpc;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  auto owned = input.segments();
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
  // A decoded tensor can be encoded, which reads all of its memory.
  std::string bytes;
  std::vector<Segment> out;
  Writer writer(bytes);
  encodeTensor(tensor, writer, out, Limits());
  return 0;
}
