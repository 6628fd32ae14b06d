#pragma once

// Bounds the time that a peer's keys take in a dict or set. Python's hashes of numbers and tuples have no secret key,
// so a peer can choose keys that collide, each of which is compared with all others. Threads: those that hold the GIL.

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <vector>

namespace torchrpc::bindings {

namespace py = pybind11;

/// Counts the slots at which Python looks while it inserts keys in turn. It keeps a table of its own, which has the
/// size and the order of slots that Python's has, because Python does not tell.
class KeyProbes {
 public:
  enum class Table : uint8_t { kDict, kSet };
  explicit KeyProbes(Table table) : table_(table) {}

  /// To be called before the key is inserted. Returns with how many earlier keys Python will compare it: those of the
  /// same hash. Throws Error(kProtocol) if the keys so far collide too often. Ignores texts and bytes, whose hashes are
  /// keyed, and keys without a hash.
  uint64_t add(py::handle key);

 private:
  static constexpr size_t kFirstSize = 8;

  void grow(size_t least);
  /// Gives a free slot to the key of that number. Returns the number of keys with the same hash that it has met.
  uint64_t insert(size_t number);
  bool mustGrow() const;

  const Table table_;
  std::vector<uint32_t> slots_;  ///< 0 or the number of the key, from 1; empty before the first key that is not ignored
  std::vector<Py_hash_t> hashes_;
  uint64_t probes_ = 0;  ///< slots at which `insert` has looked
};

}  // namespace torchrpc::bindings
