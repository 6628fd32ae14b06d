#pragma once

// References to values that live on some worker.

#include <string>
#include <utility>

#include "torchrpc/future.h"
#include "torchrpc/value.h"
#include "torchrpc/worker_info.h"

namespace torchrpc {
inline namespace v1 {

namespace detail {

/// `value` if it is an RRef; throws Error(kInvalidArgument) otherwise.
c10::IValue checkedRRef(c10::IValue value);
WorkerInfo ownerOf(const c10::IValue& rref);
bool isOwned(const c10::IValue& rref);
/// The value, fetched or waited for. `timeout` nullptr: the node's.
FutureStatePtr fetch(const c10::IValue& rref, const Duration* timeout);
/// The value itself, waited for; throws Error(kInvalidArgument) where it is not.
c10::IValue localValue(const c10::IValue& rref);

}  // namespace detail

/// A reference to a value of type `T` that lives on one worker, its owner, and stays there as long as any worker holds
/// a reference. It can be an argument and a result of calls, between C++ and Python too. Copies are cheap and share one
/// reference; every method may be called from any thread. Made by Node::remote and Node::makeRRef.
///
/// A `T` that travels (see ValueTraits) can be fetched. One that does not is a std::shared_ptr<Class>, whose object
/// functions on the owner reach with localValue().
template <typename T>
class RRef {
 public:
  /// Refers to nothing; only to be assigned to.
  RRef() = default;
  /// Throws Error(kInvalidArgument) if `value` is no RRef. (The type of what it refers to shows when it is read.)
  static RRef of(c10::IValue value) {
    RRef rref;
    rref.value_ = detail::checkedRRef(std::move(value));
    return rref;
  }

  /// Whether it refers to a value.
  explicit operator bool() const { return !value_.isNone(); }
  /// The worker on which the value lives.
  WorkerInfo owner() const { return detail::ownerOf(value_); }
  /// Whether that is this worker.
  bool isOwner() const { return detail::isOwned(value_); }

  /// A copy of the value, waited for as long as the node's calls may take; on the owner the value itself, waited for
  /// without limit. Throws Error: what the function threw that was to make it, kTimeout, kWorkerLost, kRRefDeleted
  /// after a shutdown, kSerialization for a value that does not travel, kInvalidArgument if it is no `T`.
  T toHere() const { return toHereAsync().wait(); }
  /// The same with a time-out of its own (0: none), there as here.
  T toHere(Duration timeout) const {
    const auto future = toHereAsync(timeout);
    return isOwner() ? future.wait(timeout) : future.wait();
  }
  /// The same without blocking.
  Future<T> toHereAsync() const { return Future<T>(detail::fetch(value_, nullptr)); }
  /// The same with a time-out of its own.
  Future<T> toHereAsync(Duration timeout) const { return Future<T>(detail::fetch(value_, &timeout)); }

  /// The value itself, waited for; only on its owner. Throws Error: kInvalidArgument elsewhere or if it is no `T`; what
  /// the function threw that was to make it.
  T localValue() const { return fromValue<T>(detail::localValue(value_)); }

  /// As messages hold it.
  const c10::IValue& value() const { return value_; }

 private:
  c10::IValue value_;
};

template <typename T>
struct ValueTraits<RRef<T>> {
  static c10::TypePtr type() { return c10::AnyType::get(); }
  static c10::IValue to(const RRef<T>& rref) { return rref.value(); }
  static RRef<T> from(const c10::IValue& value) { return RRef<T>::of(value); }
};

}  // namespace v1
}  // namespace torchrpc
