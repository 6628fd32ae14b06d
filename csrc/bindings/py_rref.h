#pragma once

// RRefs as Python objects, and how they get into and out of messages.

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <vector>

#include "node/node.h"
#include "rref/rref_service.h"

namespace torchrpc::bindings {

namespace py = pybind11;

/// What a Python RRef holds. The GIL protects the Python members.
class PyRRef {
 public:
  PyRRef(std::shared_ptr<Node> node, RRefPtr rref, Kind fetch_kind = Kind::kPythonRRefFetch)
      : node_(std::move(node)), rref_(std::move(rref)), fetch_kind_(fetch_kind) {}
  ~PyRRef();

  const RRefPtr& rref() const { return rref_; }
  const std::shared_ptr<Node>& node() const { return node_; }

  bool confirmedByOwner() const;
  /// The value, here; blocks without the GIL. Throws Error.
  py::object toHere(double timeout) const;
  py::object localValue() const;
  /// A torch Future that completes when the owner has the value (or, for a user's RRef, when it has confirmed it).
  py::object creationFuture() const;
  py::object profiling_future;
  py::object type_future;

 private:
  const std::shared_ptr<Node> node_;
  const RRefPtr rref_;
  const Kind fetch_kind_;
};

/// While one lives on a thread, RRefs pickled there become forks of one message to `to`.
class OutgoingRRefs : public OutgoingForks {
 public:
  OutgoingRRefs(Node& node, WorkerId to);
  ~OutgoingRRefs();
  OutgoingRRefs(const OutgoingRRefs&) = delete;
  OutgoingRRefs& operator=(const OutgoingRRefs&) = delete;

  /// The one of this thread, or nullptr.
  static OutgoingRRefs* current();

 private:
  OutgoingRRefs* const outer_;
};

/// While one lives on a thread, unpickled RRefs come from this list.
class IncomingRRefs {
 public:
  IncomingRRefs(std::shared_ptr<Node> node, const std::vector<RRefPtr>& rrefs);
  ~IncomingRRefs();
  IncomingRRefs(const IncomingRRefs&) = delete;
  IncomingRRefs& operator=(const IncomingRRefs&) = delete;

  static IncomingRRefs* current();
  /// Throws Error(kProtocol) for an index there is none of.
  py::object get(uint32_t index) const;

 private:
  const std::shared_ptr<Node> node_;
  const std::vector<RRefPtr>& rrefs_;
  IncomingRRefs* const outer_;
};

/// As the Python class RRef.
py::object wrap(std::shared_ptr<Node> node, RRefPtr rref, Kind fetch_kind = Kind::kPythonRRefFetch);

}  // namespace torchrpc::bindings
