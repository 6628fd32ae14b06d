#pragma once

// Remote references: references to values that live on one worker of the group.

#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "torchrpc/future.h"
#include "torchrpc/value.h"
#include "torchrpc/worker_info.h"

namespace torchrpc {
inline namespace v1 {

class Callable;

namespace detail {

template <typename T>
inline constexpr bool kIsSharedPointer = false;
template <typename T>
inline constexpr bool kIsSharedPointer<std::shared_ptr<T>> = true;
/// Whether an RRef to a `T` can be used as an RRef to a `Base`: both are pointers to objects, and the class of the
/// first is that of the second, or derived from it.
template <typename T, typename Base>
concept IsObjectOf = kIsSharedPointer<T> && kIsSharedPointer<Base> && std::is_convertible_v<T, Base>;

/// Returns `value` if it is an RRef; throws Error(kInvalidArgument) otherwise.
c10::IValue checkedRRef(c10::IValue value);
WorkerInfo ownerOf(const c10::IValue& rref);
bool isOwned(const c10::IValue& rref);
/// Fetches the value or, on its owner, waits for it. `timeout` null: the node's time-out.
FutureStatePtr fetch(const c10::IValue& rref, const Timeout* timeout);
/// Whether this worker owns the value and the value has not been created yet.
bool isPending(const c10::IValue& rref);
/// Waits for the value and returns it. Throws Error(kInvalidArgument) on workers that do not own it.
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
  /// A null reference, to which an RRef can be assigned.
  RRef() = default;
  /// Refers to the object of another RRef as to one of its base class: an RRef<std::shared_ptr<Base>> from an
  /// RRef<std::shared_ptr<Derived>>.
  template <typename U>
    requires(!std::is_same_v<U, T> && detail::IsObjectOf<U, T>)
  RRef(const RRef<U>& derived) : value_(derived.value()) {}  // NOLINT: implicit by design
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

  /// Fetches a copy of the value, with the node's time-out for calls. On the owner, waits for the value without a time
  /// limit. Throws Error: the error of the call that had to create the value; kTimeout; kWorkerLost; kRRefDeleted after
  /// a shutdown; kSerialization for a value that cannot be sent; kResultMismatch if it is no `T`.
  T toHere() const { return toHereAsync().wait(); }
  /// The same with another time-out, which also applies on the owner.
  T toHere(Timeout timeout) const {
    const auto future = toHereAsync(timeout);
    return isOwner() ? future.wait(timeout) : future.wait();
  }
  /// The same without blocking.
  Future<T> toHereAsync() const { return Future<T>(detail::fetch(value_, nullptr)); }
  /// The same with a time-out of its own.
  Future<T> toHereAsync(Timeout timeout) const { return Future<T>(detail::fetch(value_, &timeout)); }

  /// Waits for the value without a time limit and returns it; on the owner only. Throws Error: kInvalidArgument on
  /// another worker or if the value is no `T`; the error of the call that had to create the value.
  T localValue() const { return fromValue<T>(detail::localValue(value_)); }

  /// Calls a method of the value, a C++ object of the class `T::element_type`, on its owner, and returns its result:
  /// `env.call(&Env::step, action)`. Both programs must register the method: `TORCHRPC_FUNCTION(Env::step)`. The
  /// compiler checks the types as in NodeRef::call(). If the value has not been created yet (remote() has not ended),
  /// the call waits on the owner, without blocking a thread. So remote() and a call that follows need one round trip
  /// together. Throws as NodeRef::call() does, and the error of the call that had to create the value. To use another
  /// time-out: `node.withTimeout(5s).call(env, &Env::step, action)`.
  template <typename Method, typename... Args>
    requires std::is_member_function_pointer_v<Method>
  auto call(Method method, Args&&... args) const;
  /// Calls `callable(rref, args...)` on the owner: a registered function, or a python() function, that takes the RRef
  /// as its first argument; or method("name"), a method of a Python object.
  template <typename R = void, typename... Args>
  R call(const Callable& callable, Args&&... args) const;
  /// The same without blocking: the future of the result.
  template <typename Method, typename... Args>
    requires std::is_member_function_pointer_v<Method>
  auto callAsync(Method method, Args&&... args) const;
  /// The same.
  template <typename R = void, typename... Args>
  Future<R> callAsync(const Callable& callable, Args&&... args) const;
  /// The same, but the result stays on the owner: an RRef to it.
  template <typename Method, typename... Args>
    requires std::is_member_function_pointer_v<Method>
  auto remote(Method method, Args&&... args) const;
  /// The same.
  template <typename R, typename... Args>
  RRef<R> remote(const Callable& callable, Args&&... args) const;

  /// The reference as a c10::IValue, the form in which messages hold it.
  const c10::IValue& value() const { return value_; }

 private:
  c10::IValue value_;
};

template <typename T>
struct ValueTraits<RRef<T>> {
  static c10::TypePtr type() { return c10::AnyType::get(); }
  static c10::IValue to(const RRef<T>& rref) { return detail::checkedRRef(rref.value()); }
  static RRef<T> from(const c10::IValue& value) { return RRef<T>::of(value); }
};

}  // namespace v1
}  // namespace torchrpc

#include "torchrpc/node.h"  // the templates of call(), callAsync() and remote()
