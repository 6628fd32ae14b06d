#pragma once

// Encodes plain Python data without pickle: wire/value_codec for Python objects.
// Threads: any, with the GIL.

#include <torch/csrc/utils/pybind.h>

#include <initializer_list>
#include <vector>

#include "bindings/py_rref.h"
#include "wire/value_codec.h"

namespace torchrpc::bindings {

/// Appends the objects, one after the other, if they are plain data: None, bool, int (-2^63 to 2^64 - 1), float,
/// complex, str, bytes, torch.Tensor (exactly), dtype, device, RRef, or lists, tuples, dicts and cpp_struct dataclasses
/// of those in which no container occurs twice. Otherwise returns false; the caller must then discard the appended
/// bytes and use encodeObjects() or pickle, which preserve object identity. RRefs are added to `rrefs`. Throws Error
/// for an RRef that cannot be forked.
bool encodePlain(
    std::initializer_list<py::handle> objects, Writer& out, std::vector<at::Tensor>& tensors, OutgoingRRefs& rrefs);

/// Appends any value that has a form without pickle: see torchrpc/rpc/_values/plain_objects.py. `classes`: for
/// lower_object() there. `what`: for refuse_to_send() there, which raises the error for another value. RRefs are added
/// to `rrefs`; null: they are refused.
void encodeObjects(
    py::handle object, Writer& out, std::vector<at::Tensor>& tensors, OutgoingRRefs* rrefs, const py::object& classes,
    const py::object& what);

/// Reads one value, with RRefs from `rrefs`. Throws Error(kProtocol), and the Python exceptions of a dataclass.
py::object decodePlain(
    Reader& in, const std::vector<at::Tensor>& tensors, const IncomingRRefs& rrefs, const Limits& limits = {});
/// Reads one value that may have objects. `allowed`: the allow-list for their classes, or None.
py::object decodeObjects(
    Reader& in, const std::vector<at::Tensor>& tensors, const IncomingRRefs& rrefs, const py::object& allowed);

/// Returns the Python object for a value without RRefs that torch::jit::toPyObject does not know; see
/// wire/value_forms.h.
py::object formToPython(const c10::IValue& value);

}  // namespace torchrpc::bindings
