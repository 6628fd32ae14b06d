#include "bindings/py_keys.h"

#include <algorithm>
#include <bit>

#include "base/error.h"

namespace torchrpc::bindings {
namespace {

// Keys that nobody has chosen take 2 on average. Numbers with 40 equal low bits take 10, and in sets, which look at
// neighbours first, 100.
constexpr uint64_t kProbesOfKey = 64;
constexpr uint64_t kProbesOfElement = 256;
constexpr uint64_t kFreeProbes = 1 << 13;

}  // namespace

uint64_t KeyProbes::add(py::handle key) {
  if (PyUnicode_CheckExact(key.ptr()) || PyBytes_CheckExact(key.ptr())) return 0;
  const auto hash = PyObject_Hash(key.ptr());
  if (hash == -1) {
    PyErr_Clear();  // the insertion of the key raises it again
    return 0;
  }
  if (slots_.empty()) slots_.resize(kFirstSize);
  // dictobject.c and setobject.c grow like this: before the insertion, and after it.
  if (table_ == Table::kDict && mustGrow()) grow(3 * hashes_.size());
  hashes_.push_back(hash);
  const auto compared = insert(hashes_.size());
  if (table_ == Table::kSet && mustGrow()) grow((hashes_.size() > 50000 ? 2 : 4) * hashes_.size() + 1);
  const auto probes_each = table_ == Table::kDict ? kProbesOfKey : kProbesOfElement;
  if (probes_ > kFreeProbes + probes_each * hashes_.size()) {
    throw Error(ErrorCode::kProtocol, "malformed message: the hashes of its keys collide too often");
  }
  return compared;
}

bool KeyProbes::mustGrow() const {
  const auto size = slots_.size();
  return table_ == Table::kDict ? hashes_.size() >= size * 2 / 3 : hashes_.size() * 5 >= (size - 1) * 3;
}

void KeyProbes::grow(size_t least) {
  slots_.assign(std::bit_ceil(std::max(least, kFirstSize)), 0);
  for (size_t number = 1; number <= hashes_.size(); ++number) insert(number);
}

uint64_t KeyProbes::insert(size_t number) {
  constexpr size_t kLinearProbes = 9;  // of sets
  const auto hash = hashes_[number - 1];
  const auto mask = slots_.size() - 1;
  auto perturb = static_cast<size_t>(hash);
  auto slot = perturb & mask;
  for (uint64_t equal = 0;;) {
    const auto last = table_ == Table::kSet && slot + kLinearProbes <= mask ? slot + kLinearProbes : slot;
    for (auto at = slot; at <= last; ++at) {
      ++probes_;
      if (slots_[at] == 0) {
        slots_[at] = static_cast<uint32_t>(number);
        return equal;
      }
      if (hashes_[slots_[at] - 1] == hash) ++equal;
    }
    perturb >>= 5;
    slot = (slot * 5 + perturb + 1) & mask;
  }
}

}  // namespace torchrpc::bindings
