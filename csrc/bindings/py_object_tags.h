#pragma once

// What the encoder and the decoder of Python values share (py_codec.h). Threads: any, with the GIL.

#include <torch/csrc/utils/pybind.h>

#include <string_view>

#include "bindings/py_codec.h"

namespace torchrpc::bindings {

constexpr uint32_t kMaxDepth = 200;
constexpr Py_ssize_t kMaxIntDigits = 1 << 16;  // hexadecimal

// The tags that only values with objects have (PROTOCOL.md, "Values with objects").
constexpr auto kObject = ValueTag{20};     // kind (short), u32 count, values: what an object is made of
constexpr auto kSame = ValueTag{21};       // u32: the container or object of that number, in the order of their ends
constexpr auto kLongInt = ValueTag{22};    // string: an int in hexadecimal digits
constexpr auto kSet = ValueTag{23};        // u32 count, values
constexpr auto kFrozenSet = ValueTag{24};  // u32 count, values

/// Takes the new reference that a function of C has returned. Throws the Python error if it is null.
inline py::object steal(PyObject* object) {
  if (!object) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

/// The characters of a str, as long as it lives; none for other objects and for lone surrogates.
inline std::string_view view(py::handle text) {
  Py_ssize_t size = 0;
  const char* utf8 = PyUnicode_CheckExact(text.ptr()) ? PyUnicode_AsUTF8AndSize(text.ptr(), &size) : nullptr;
  if (!utf8) PyErr_Clear();
  return utf8 ? std::string_view(utf8, static_cast<size_t>(size)) : std::string_view();
}

}  // namespace torchrpc::bindings
