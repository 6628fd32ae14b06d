#pragma once

// Remote references: references to values that live on one worker of the group.

#include <string>
#include <utility>

#include "torchrpc/future.h"
#include "torchrpc/value.h"
#include "torchrpc/worker_info.h"

namespace torchrpc {
inline namespace v1 {

namespace detail {

/// Returns `value` if it is an RRef; throws Error(kInvalidArgument) otherwise.
c10::IValue checkedRRef(c10::IValue value);
WorkerInfo ownerOf(const c10::IValue& rref);
bool isOwned(const c10::IValue& rref);
/// The value, fetched or waited for. `timeout` null: the node's time-out.
FutureStatePtr fetch(const c10::IValue& rref, const Timeout* timeout);
/// The value itself, waited for; throws Error(kInvalidArgument) on workers that do not own it.
c10::IValue localValue(const c10::IValue& rref);

}  // namespace detail

/// A reference to a value of type `T` on one worker, its owner. The value lives as long as any worker holds a
/// reference. An RRef can be an argument or a result of calls, also between C++ and Python. Copies are cheap and share
/// one reference; every method may be called from any thread. Node::remote and Node::makeRRef create RRefs.
///
/// A value whose type can be sent (see ValueTraits) can be fetched. An object of any other class is a
/// std::shared_ptr<Class>: only functions on the owner can use it, with localValue().
template <typename T>
class RRef {
 public:
  /// A null reference, to assign to.
  RRef() = default;
  /// The RRef in `value`. Throws Error(kInvalidArgument) if it is no RRef. Whether the value has type `T` is checked
  /// when it is read.
  static RRef of(c10::IValue value) {
    RRef rref;
    rref.value_ = detail::checkedRRef(std::move(value));
    return rref;
  }

  /// Whether it refers to a value.
  explicit operator bool() const { return !value_.isNone(); }
  /// The worker on which the value lives.
  WorkerInfo owner() const { return detail::ownerOf(value_); }
  /// Whether this worker is the owner.
  bool isOwner() const { return detail::isOwned(value_); }

  /// Fetches a copy of the value, with the node's time-out for calls. On the owner, waits for the value itself without
  /// a limit. Throws Error: the error of the call that had to create the value; kTimeout; kWorkerLost; kRRefDeleted
  /// after a shutdown; kSerialization for a value that cannot be sent; kInvalidArgument if it is no `T`.
  T toHere() const { return toHereAsync().wait(); }
  /// The same with a time-out of its own (0: no limit), which holds on the owner, too.
  T toHere(Timeout timeout) const {
    const auto future = toHereAsync(timeout);
    return isOwner() ? future.wait(timeout) : future.wait();
  }
  /// The same without blocking.
  Future<T> toHereAsync() const { return Future<T>(detail::fetch(value_, nullptr)); }
  /// The same with a time-out of its own.
  Future<T> toHereAsync(Timeout timeout) const { return Future<T>(detail::fetch(value_, &timeout)); }

  /// The value itself, waited for without a limit; on the owner only. Throws Error: kInvalidArgument on another worker
  /// or if the value is no `T`; the error of the call that had to create the value.
  T localValue() const { return fromValue<T>(detail::localValue(value_)); }

  /// The reference as a c10::IValue, the form in which messages hold it.
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
