#pragma once

// The reliable requests of a node. A request has one call id until it is answered, so that an answer to any attempt
// completes it, however late it arrives. At most kReliableWindow requests to one worker are unanswered at a time; the
// others wait here, and are sent in the order in which they were made. Threads: any.

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/sync/mutex.h"
#include "base/timer.h"
#include "calls/activity.h"
#include "calls/messenger.h"

namespace torchrpc {

/// The limit on unanswered requests to one worker. The receiver's loop serves them one after another, and other
/// messages wait meanwhile. With a window eight times as large, a call behind the deletions of four workers took 0.2 s.
constexpr size_t kReliableWindow = 512;

class ReliableRequests {
 public:
  struct Request {
    Request(PeerId to, Message message, Responder done, ActivityToken token)
        : to(to), message(std::move(message)), done(std::move(done)), token(std::move(token)) {}

    // Constant after construction:
    const PeerId to;        ///< a later start of the worker must not get the message
    const Message message;  ///< with the call id of all attempts
    const Responder done;
    const ActivityToken token;
    // Used by one attempt at a time:
    Duration pause = std::chrono::milliseconds(10);  ///< before the next attempt
    int lost_attempts = 0;                           ///< attempts that ended with kWorkerLost

   private:
    friend class ReliableRequests;
    // Guarded by ReliableRequests::mutex_:
    size_t index = 0;  ///< in Queue::unanswered
    int rounds = 0;    ///< of sendAgain() since the last attempt
    int resend_at = 2;
  };
  using RequestPtr = std::shared_ptr<Request>;

  struct Actions {
    /// Makes the first attempt, and the attempts that follow failures; calls finish() in the end.
    std::function<void(const RequestPtr&)> send;
    /// Sends a request once more whose attempt has had no answer for a long time.
    std::function<void(const Request&)> resend;
  };

  /// The timer must outlive this object.
  ReliableRequests(Timer& timer, Actions actions) : timer_(timer), actions_(std::move(actions)) {}

  /// Sends the request, at once or when others have been answered.
  void add(RequestPtr request);
  /// Completes a request that has been answered or has failed, unless close() has done so. With `is_lost` (its worker
  /// cannot be reached), the waiting requests to that worker fail, too.
  void finish(const RequestPtr& request, Result<Message> result, bool is_lost);
  /// Fails all requests, and all that are added later.
  void close(const Error& reason);

 private:
  /// The requests to one worker.
  struct Queue {
    std::vector<RequestPtr> unanswered;
    std::deque<RequestPtr> waiting;
    bool is_sending = false;  ///< a thread is in sendWaiting()
  };

  /// Sends waiting requests while the window has room. If requests are unanswered, it sends only a few, because
  /// finish() will call it again. Only for the thread that has set Queue::is_sending.
  void sendWaiting(WorkerId to);
  void send(const RequestPtr& request);
  static void addUnanswered(Queue& queue, const RequestPtr& request);
  /// Runs one round on the timer. Rounds follow each other while any request is unanswered.
  void sendAgain();
  void scheduleRound();
  /// Returns false if close() has taken the request.
  static bool remove(Queue& queue, const RequestPtr& request);

  // Constant after construction:
  Timer& timer_;
  const Actions actions_;
  // Own synchronization:
  std::atomic<bool> is_round_scheduled_{false};
  // Guarded by mutex_:
  Mutex mutex_;
  std::unordered_map<WorkerId, Queue> queues_ TORCHRPC_GUARDED_BY(mutex_);
  Status close_reason_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
