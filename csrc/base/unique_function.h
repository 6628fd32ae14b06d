#pragma once

// A function object that can be moved and not copied, as std::move_only_function of C++23. So it holds functions that
// own something, and it needs no memory of its own for those of at most kInlineBytes: std::function allocates for any
// that owns something.

#include <cstddef>
#include <functional>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

namespace torchrpc {

template <typename Signature>
class UniqueFunction;

template <typename Result, typename... Arguments>
class UniqueFunction<Result(Arguments...)> {
 public:
  static constexpr size_t kInlineBytes = 72;

  UniqueFunction() = default;
  UniqueFunction(std::nullptr_t) {}  // NOLINT(google-explicit-constructor): as std::function
  template <typename Function>
    requires(
        !std::is_same_v<std::remove_cvref_t<Function>, UniqueFunction> &&
        std::is_invocable_r_v<Result, std::remove_cvref_t<Function>&, Arguments...>)
  UniqueFunction(Function&& function) {  // NOLINT(google-explicit-constructor): as std::function
    using Held = std::remove_cvref_t<Function>;
    if constexpr (std::is_same_v<Held, std::function<Result(Arguments...)>>) {
      if (!function) return;  // an empty one stays empty
    }
    if constexpr (isInline<Held>()) {
      new (&storage_) Held(std::forward<Function>(function));
      table_ = &kInline<Held>;
    } else {
      new (&storage_) std::unique_ptr<Held>(std::make_unique<Held>(std::forward<Function>(function)));
      table_ = &kOwned<Held>;
    }
  }
  UniqueFunction(UniqueFunction&& other) noexcept { takeFrom(other); }
  UniqueFunction& operator=(UniqueFunction&& other) noexcept {
    if (this == &other) return *this;
    UniqueFunction old(std::move(*this));  // its destructor may use this object
    takeFrom(other);
    return *this;
  }
  ~UniqueFunction() {
    if (table_) table_->destroy(&storage_);
  }
  UniqueFunction(const UniqueFunction&) = delete;
  UniqueFunction& operator=(const UniqueFunction&) = delete;

  explicit operator bool() const { return table_ != nullptr; }
  /// Must not be empty.
  Result operator()(Arguments... arguments) const {  // NOLINT(performance-unnecessary-value-param): as std::function
    return table_->invoke(&storage_, std::forward<Arguments>(arguments)...);
  }

 private:
  struct Table {
    Result (*invoke)(void* storage, Arguments&&... arguments);
    /// Moves the function to other storage, which has none, and destroys it here.
    void (*relocate)(void* from, void* to) noexcept;
    void (*destroy)(void* storage) noexcept;
  };

  template <typename Held>
  static constexpr bool isInline() {
    return sizeof(Held) <= kInlineBytes && alignof(Held) <= alignof(void*) &&
        std::is_nothrow_move_constructible_v<Held>;
  }
  template <typename Object>
  static Object& in(void* storage) {
    return *std::launder(static_cast<Object*>(storage));
  }
  template <typename Object>
  static void relocate(void* from, void* to) noexcept {
    new (to) Object(std::move(in<Object>(from)));
    in<Object>(from).~Object();
  }
  template <typename Object>
  static void destroy(void* storage) noexcept {
    in<Object>(storage).~Object();
  }
  template <typename Held>
  static constexpr Table kInline{
      [](void* storage, Arguments&&... arguments) -> Result {
        return static_cast<Result>(in<Held>(storage)(std::forward<Arguments>(arguments)...));
      },
      &relocate<Held>, &destroy<Held>};
  template <typename Held>
  static constexpr Table kOwned{
      [](void* storage, Arguments&&... arguments) -> Result {
        return static_cast<Result>((*in<std::unique_ptr<Held>>(storage))(std::forward<Arguments>(arguments)...));
      },
      &relocate<std::unique_ptr<Held>>, &destroy<std::unique_ptr<Held>>};

  /// This object must be empty.
  void takeFrom(UniqueFunction& other) noexcept {
    if (!other.table_) return;
    other.table_->relocate(&other.storage_, &storage_);
    table_ = std::exchange(other.table_, nullptr);
  }

  // As with std::function, a constant one may call a function that changes.
  alignas(void*) mutable std::byte storage_[kInlineBytes];
  const Table* table_ = nullptr;
};

}  // namespace torchrpc
