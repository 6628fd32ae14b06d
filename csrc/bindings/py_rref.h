#pragma once

// RRefs as Python objects, and their encoding in messages.

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <vector>

#include "node/node.h"
#include "rref/rref_service.h"

namespace torchrpc::bindings {

namespace py = pybind11;

/// The C++ part of a Python RRef. The GIL protects the Python members.
class PyRRef {
 public:
  PyRRef(std::shared_ptr<Node> node, RRefPtr rref, Kind fetch_kind = Kind::kPythonRRefFetch)
      : node_(std::move(node)), rref_(std::move(rref)), fetch_kind_(fetch_kind) {}
  ~PyRRef();

  const RRefPtr& rref() const { return rref_; }
  /// Throws Error(kShutdown) in a forked child.
  const std::shared_ptr<Node>& node() const {
    node_->requireItsProcess();
    return node_;
  }

  bool confirmedByOwner() const;
  /// Returns a copy of the value, or on the owner the value itself. `timeout` in seconds. Blocks without the GIL.
  /// Throws Error.
  py::object toHere(double timeout) const;
  py::object localValue() const;
  /// Returns a torch Future that completes when the owner has the value (or, for a user's RRef, when it has confirmed
  /// it).
  py::object creationFuture() const;
  py::object profiling_future;
  py::object type_future;

 private:
  const std::shared_ptr<Node> node_;
  const RRefPtr rref_;
  const Kind fetch_kind_;
};

/// While an instance exists on a thread, RRefs that are pickled there become forks of one message to `to`.
class OutgoingRRefs : public OutgoingForks {
 public:
  OutgoingRRefs(Node& node, WorkerId to);
  ~OutgoingRRefs();
  OutgoingRRefs(const OutgoingRRefs&) = delete;
  OutgoingRRefs& operator=(const OutgoingRRefs&) = delete;

  /// The innermost instance of this thread, or nullptr.
  static OutgoingRRefs* current();

 private:
  OutgoingRRefs* const outer_;
};

/// While an instance exists on a thread, RRefs that are unpickled there are looked up in `rrefs`.
class IncomingRRefs {
 public:
  IncomingRRefs(std::shared_ptr<Node> node, const std::vector<RRefPtr>& rrefs);
  ~IncomingRRefs();
  IncomingRRefs(const IncomingRRefs&) = delete;
  IncomingRRefs& operator=(const IncomingRRefs&) = delete;

  static IncomingRRefs* current();
  /// Throws Error(kProtocol) for an index out of range.
  py::object get(uint32_t index) const;

 private:
  const std::shared_ptr<Node> node_;
  const std::vector<RRefPtr>& rrefs_;
  IncomingRRefs* const outer_;
};

/// Returns the Python object of an RRef.
py::object wrap(std::shared_ptr<Node> node, RRefPtr rref, Kind fetch_kind = Kind::kPythonRRefFetch);

/// Returns "file:line" of the innermost Python frame that is not torchrpc's; null unless TORCHRPC_RREF_ORIGINS is 1.
/// Needs the GIL.
std::shared_ptr<const std::string> lineOfProgram();

}  // namespace torchrpc::bindings
