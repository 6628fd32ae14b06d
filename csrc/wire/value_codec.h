#pragma once

// Plain values as bytes: one format with two front ends, IValue here and Python objects in bindings/py_codec.
// Tensors go beside the bytes, in Message::tensors; the bytes hold their index.

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <functional>
#include <string>
#include <vector>

#include "wire/codec.h"
#include "wire/limits.h"

namespace torchrpc {

/// What follows each tag is in PROTOCOL.md. The numbers are part of the wire protocol.
enum class ValueTag : uint8_t {
  kNone = 0,
  kFalse = 1,
  kTrue = 2,
  kInt = 3,      ///< i64
  kDouble = 4,   ///< f64
  kComplex = 5,  ///< f64 real, f64 imaginary
  kString = 6,   ///< UTF-8: u64 length, bytes
  kBytes = 7,    ///< u64 length, bytes
  kTensor = 8,   ///< u32 index into Message::tensors
  kList = 9,     ///< u32 count, values
  kTuple = 10,   ///< u32 count, values
  kDict = 11,    ///< u32 count, then key, value, key, value … in insertion order
  kDevice = 12,  ///< string, as c10::Device::str() gives it
  kDtype = 13,   ///< u8, the c10::ScalarType (IValue holds it as an int: only Python writes this)
  kRRef = 14,    ///< u32 index into the kRRefForks header's list (rref/)
};

/// The place of an RRef among those of the message that is written, and the RRef at a place of one that is read.
using RRefPlace = std::function<uint32_t(const c10::IValue& rref)>;
using RRefAt = std::function<c10::IValue(uint32_t place)>;

/// Appends `value`; its tensors are appended to `tensors` (the same TensorImpl twice: one entry, two references).
/// Throws Error(kSerialization) for what has no plain form (objects, futures, generators), naming its type, and for
/// nesting deeper than `limits.depth`. RRefs have a plain form where `rrefs` is given.
void encodeValue(
    const c10::IValue& value, Writer& out, std::vector<at::Tensor>& tensors, const Limits& limits = {},
    const RRefPlace& rrefs = {});

/// Reads one value. `type`, if given, is what the value is for (an operator's argument): it chooses the element types
/// of lists and dicts, turns int into float where the type is float, and rejects, with Error(kInvalidArgument), a
/// value that does not fit. Without it lists of only ints, floats, bools or tensors become lists of that, other lists
/// and dicts generic ones. Throws Error(kProtocol) on malformed bytes, whatever they are.
c10::IValue decodeValue(
    Reader& in, const std::vector<at::Tensor>& tensors, const c10::TypePtr& type = nullptr, const Limits& limits = {},
    const RRefAt& rrefs = {});

}  // namespace torchrpc
