#pragma once

// Encodes plain values as bytes: IValues here, Python objects in bindings/py_codec, in the same format. Tensors are
// beside the bytes, in Message::tensors; the bytes contain their indices.

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <functional>
#include <string>
#include <vector>

#include "wire/codec.h"
#include "wire/limits.h"

namespace torchrpc {

/// The first byte of a value; PROTOCOL.md, "Values", specifies the rest. The numbers are part of the wire protocol.
enum class ValueTag : uint8_t {
  kNone = 0,
  kFalse = 1,
  kTrue = 2,
  kInt = 3,         ///< i64
  kDouble = 4,      ///< f64
  kComplex = 5,     ///< f64 real, f64 imaginary
  kString = 6,      ///< UTF-8: u64 length, bytes
  kBytes = 7,       ///< u64 length, bytes
  kTensor = 8,      ///< u32 index into Message::tensors
  kList = 9,        ///< u32 count, values
  kTuple = 10,      ///< u32 count, values
  kDict = 11,       ///< u32 count, then key, value, key, value … in insertion order
  kDevice = 12,     ///< string, as c10::Device::str() returns it
  kDtype = 13,      ///< u8, the c10::ScalarType. Only Python writes it: in an IValue a dtype is an int
  kRRef = 14,       ///< u32 index into the kRRefForks header's list (rref/)
  kParameter = 15,  ///< as kTensor; in Python an nn.Parameter. Only Python writes it
  kUnsigned = 16,   ///< u64, an int of 2^63 or more
  kNumbers = 17,    ///< u32 index into Message::tensors: a list of the numbers in that tensor
  kLongBytes = 18,  ///< u32 index into Message::tensors: the bytes in that tensor. Only C++ writes it
  kStruct = 19,     ///< string name, u32 count, then for each field its name (short) and its value
  // 20 to 24 are those of values with objects: bindings/py_object_tags.h
};

/// RRefIndexOf, for a message that is written, returns the index of an RRef in the message's list of RRefs. RRefAt, for
/// a message that is read, returns the RRef at an index.
using RRefIndexOf = std::function<uint32_t(const c10::IValue& rref)>;
using RRefAt = std::function<c10::IValue(uint32_t index)>;

/// Appends `value` to `out` and its tensors to `tensors`. The value may contain the forms of wire/value_forms.h. A
/// TensorImpl that occurs twice is one entry with two references. Throws Error(kSerialization), which names the type,
/// for a value without a plain form (object, future, generator), and for containers nested deeper than `limits.depth`.
/// RRefs have a plain form if `rrefs` is given.
void encodeValue(
    const c10::IValue& value, Writer& out, std::vector<at::Tensor>& tensors, const Limits& limits = {},
    const RRefIndexOf& rrefs = {});

/// Reads one value. `type`, if given, is the expected type (of an operator's argument). It determines the element types
/// of lists and dicts, and an int becomes a float where the type is float. The number of a dtype, a layout or a memory
/// format must be that of an enumerator. Throws Error(kInvalidArgument) if the value does not match the type. Without
/// `type`, a list of only ints, floats, bools or tensors becomes a list of that type; other lists, and dicts, become
/// generic ones; a list of numbers in one tensor becomes a NumberList, a struct a StructValue, bytes an IValue that
/// holds a c10::Storage (wire/value_forms.h). Throws Error(kProtocol) for malformed bytes.
c10::IValue decodeValue(
    Reader& in, const std::vector<at::Tensor>& tensors, const c10::TypePtr& type = nullptr, const Limits& limits = {},
    const RRefAt& rrefs = {});

/// Reads the name of a device. Throws Error(if_wrong) if no device can have that name; this worker need not have the
/// device.
at::Device readDevice(Reader& in, ErrorCode if_wrong);

}  // namespace torchrpc
