#pragma once

// Plain Python data as bytes and back, without pickle: the Python front end of wire/value_codec.
// Everything here needs the GIL.

#include <torch/csrc/utils/pybind.h>

#include <vector>

#include "bindings/py_rref.h"
#include "wire/value_codec.h"

namespace torchrpc::bindings {

/// Appends `object` if it is plain data: None, bool, int (64 bits), float, complex, str, bytes, torch.Tensor (exactly),
/// dtype, device, RRef, and lists, tuples and dicts of those in which no container stands twice. False if not: what has
/// been appended then is to be thrown away, and pickle takes over, which keeps identities.
/// RRefs go into `rrefs`. Throws Error for an RRef that cannot be forked.
bool encodePlain(py::handle object, Writer& out, std::vector<at::Tensor>& tensors, OutgoingRRefs& rrefs);

/// Reads one value; RRefs come from `rrefs`. Throws Error(kProtocol).
py::object decodePlain(
    Reader& in, const std::vector<at::Tensor>& tensors, const IncomingRRefs& rrefs, const Limits& limits = {});

/// Where a callable that can be found by name is defined.
struct CallableName {
  std::string module;
  std::string qualname;
};
/// The name under which the callee will find `callable`, if looking it up here gives the same object: as pickle does.
std::optional<CallableName> nameOf(py::handle callable);
/// Looks a callable up; imports the module if need be. Throws what Python raises.
py::object findCallable(std::string_view module, std::string_view qualname);

}  // namespace torchrpc::bindings
