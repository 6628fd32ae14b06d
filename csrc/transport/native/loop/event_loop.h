#pragma once

// The one thread of a native transport: libuv tells it which sockets are ready, the rest of the transport what to do
// then. Peers that write to shared memory are looked after by threads that wait for them: see Note [Spinning] and
// Note [Sleeping in the loop's place].
// Threads: post(), stop(), inLoop(), poll(), sleep() from any; all else on the loop, or, where it says "in turn", on
// the thread that assists.

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "base/sync/futex_waiter.h"
#include "base/sync/mutex.h"
#include "base/timer.h"

namespace torchrpc::native {

class EventLoop {
  struct Handle;
  struct State;

 public:
  /// What a watch or a timer is called with.
  struct Ready {
    bool readable = false;
    bool writable = false;
    bool failed = false;  ///< the last call: read what is left
  };
  using Callback = std::function<void(Ready)>;

  /// A descriptor that is watched, or a deadline; until it is destroyed (on the loop, perhaps in its own callback).
  class Watch {
   public:
    Watch() = default;
    Watch(Watch&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    Watch& operator=(Watch&& other) noexcept {
      std::swap(handle_, other.handle_);
      return *this;
    }
    ~Watch();
    /// What to be told of; neither: paused. Only for descriptors.
    void want(bool readable, bool writable);
    explicit operator bool() const { return handle_ != nullptr; }

   private:
    friend class EventLoop;
    explicit Watch(Handle* handle) : handle_(handle) {}
    Handle* handle_ = nullptr;
  };

  /// What there is to be expected of who is polled.
  enum class PollHint {
    kNone,
    kReplyExpected,    ///< the answer to something large may be on its way
    kWriteInProgress,  ///< something large is nearly there
  };

  /// Who is to be woken by what comes.
  enum class WakeTarget {
    kLoop,
    kThread,  ///< that sleeps on the bell
  };

  /// What can be polled rather than waited for. The owner takes it away before it is destroyed. Called in turn.
  class Pollable {
   public:
    virtual ~Pollable() = default;
    /// Does what there is to do; whether there was anything.
    virtual bool poll() = 0;
    /// Read after poll(), in turn.
    virtual PollHint pollHint() const { return PollHint::kNone; }
    /// Whether it had better be left to the loop for now. In the loop's turn.
    virtual bool keepsLoopBusy() { return false; }
    /// Nobody is going to look: whoever is at the other end must wake `sleeper` from now on (kThread: only where there
    /// is a bell). False if there is something to do at once.
    virtual bool arm(WakeTarget sleeper) = 0;
    /// Somebody looks again.
    virtual void disarm() = 0;
    /// What a thread can sleep on.
    virtual std::optional<FutexWaiter::WaitWord> waitWord() = 0;
  };

  /// Throws Error(kRendezvous) if the system gives us no loop. `longest_spin`: zero never spins.
  explicit EventLoop(Duration longest_spin);
  /// stop().
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  /// False, and the task is destroyed unrun, once stop() has let go of the last task.
  bool post(std::function<void()> task);
  /// Runs what is queued, and what that posts, then ends the thread. All watches must be gone by then. Not from the
  /// loop. Idempotent.
  void stop();
  bool inLoop() const;
  /// Looks at what is hot, in the loop's place, until `done` or until it is not worth it any more. Not in turn.
  void poll(const std::function<bool()>& done);
  /// Sleeps on the wait_words of what is hot: see Transport::sleep. Not in turn.
  void sleep(const std::function<bool()>& done, FutexWaiter& waiter, TimePoint latest, bool preemptible);

  /// Told of nothing until want(). Called out of turn. Throws Error(kWorkerLost) if the descriptor cannot be watched.
  Watch watch(int fd, Callback callback);
  /// Called once, out of turn.
  Watch after(Duration delay, std::function<void()> callback);
  /// The loop's turn, until it has done what there is to do: whoever is called out of turn takes it before it touches
  /// what is only touched in turn. Tasks have it. Idempotent.
  void lockLoop();

  // In turn.
  /// The spinner has been active: it is worth looking at for a while. It is armed before the loop sleeps.
  void addToPollSet(Pollable& spinner);
  void removeFromPollSet(Pollable& spinner);

  /// Memory for whoever is called by the loop, until it returns.
  std::span<char> scratch() { return scratch_; }

 private:
  void run();
  void runTasks();
  void wake();
  /// False if it has to be kept, as in unlockTurn().
  bool unlockLoop();
  // In turn; see Note [Spinning].
  /// Whether the loop can sleep.
  bool armHot();
  bool pollAll();
  /// Whether what is hot had better be left to the loop.
  bool isBusy() const;
  PollHint pollHint() const;
  /// Looks for what is nearly there.
  void awaitComing();
  /// False if something has come meanwhile.
  bool armAll();
  /// Until `done`, or until there has been no news for a while.
  void look(const std::function<bool()>& done);
  /// Becomes the thread that sleeps on wait_words; false if there is one that does not give way.
  bool enterSleep(FutexWaiter& waiter, bool preemptible);
  /// The wait_words of what is hot, which armAll() arms for that thread from now on; as many as it can sleep on.
  std::vector<FutexWaiter::WaitWord> collectWaitWords();
  /// Ends a turn that is not the loop's: arms what is hot, and leaves to the loop what has come meanwhile.
  void leaveTurn();
  /// False if the turn has to be kept: the thread that is armed for has left, and all must be armed for the loop.
  bool unlockTurn();
  // Not in turn.
  bool isSleeper(const FutexWaiter& waiter) const { return sleeper_.load() == &waiter; }
  /// False if another thread has become the sleeper meanwhile.
  bool leaveSleep(const FutexWaiter& waiter);
  /// Lets others run, also out of turn. False if that took long.
  bool yield();
  /// Takes the turn as soon as whoever has it leaves; false if that takes long, or if it is not needed any more. Not in
  /// turn.
  bool awaitTurn(const std::function<bool()>& done);

  // Constant after construction.
  const Duration longest_spin_;
  std::unique_ptr<State> state_;  // on the loop only, but for the waking of it

  // Own synchronization.
  std::atomic<bool> has_tasks_{false};
  std::atomic<bool> sleeping_{false};
  std::mutex loop_mutex_;  ///< no leaf lock: whoever has it is called back by what is hot
  std::atomic<bool> loop_thread_waits_{false};
  std::atomic<TimePoint> rest_until_{TimePoint()};  ///< nobody looks before
  std::atomic<Duration> rest_{Duration::zero()};    ///< how long the last one was
  std::atomic<FutexWaiter*> sleeper_{nullptr};      ///< of the thread that sleeps on wait_words; changed under mutex_

  // Guarded by mutex_.
  Mutex mutex_;
  std::vector<std::function<void()>> tasks_ TORCHRPC_GUARDED_BY(mutex_);
  bool stopping_ TORCHRPC_GUARDED_BY(mutex_) = false;
  bool stopped_ TORCHRPC_GUARDED_BY(mutex_) = false;
  bool sleeper_gives_way_ TORCHRPC_GUARDED_BY(mutex_) = false;

  // In turn.
  struct Hot {
    Pollable* spinner;  // nullptr once forgotten
    int idle_rounds = 0;
    bool slept_on = false;
  };
  std::vector<Hot> hot_;
  bool unarmed_ = false;           ///< some spinner may have to be armed before the loop sleeps
  bool armed_for_thread_ = false;  ///< some spinner was, the last time
  std::vector<char> scratch_;

  // On the loop only.
  bool has_loop_lock_ = false;

  // Touched by the constructor and by stop() only.
  std::thread thread_;
};

}  // namespace torchrpc::native
