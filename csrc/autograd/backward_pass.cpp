#include "autograd/backward_pass.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "base/executor/thread_pool.h"
#include "base/sync/interrupt.h"
#include "calls/thread_record.h"
#include "device/streams.h"

namespace torchrpc {

using torch::autograd::AccumulateGrad;

namespace {

Error unexpectedGradients() { return {ErrorCode::kProtocol, "gradients that the backward pass does not wait for"}; }

}  // namespace

BackwardPass::BackwardPass(
    const Environment& environment, ContextPtr context, PassId id, BackwardMode mode, bool retain_graph)
    : environment_(environment), context_(std::move(context)), id_(id), mode_(mode), retain_graph_(retain_graph) {
  graph_.emplace(
      retain_graph,
      LocalGraph::Sinks{
          .deliver = [this](const RecvFunction& recv, variable_list gradients) { deliver(recv, std::move(gradients)); },
          .accumulate = [this](
                            const at::Tensor& leaf,
                            at::Tensor gradient) { leaf_gradients_.emplace_back(leaf, std::move(gradient)); },
          .lend = [this](const AccumulateGrad& leaf) { return lend(leaf); },
      });
}

// --- marking ---

BackwardPass::RecvFunctions BackwardPass::addSends(const Sends& sends) {
  RecvFunctions received;
  for (const auto& send : sends) {
    if (!marked_.insert(send->id()).second) continue;
    awaiting_gradients_.insert(send->id());
    const auto more = graph_->add(send);
    received.insert(received.end(), more.begin(), more.end());
  }
  return received;
}

NodeOf<SendFunction> BackwardPass::sendTo(WorkerId receiver, MessageId id) const {
  auto send = context_->send(id);
  return send && send->receiver() == receiver ? std::move(send) : nullptr;
}

BackwardPass::Sends BackwardPass::sendsTo(WorkerId receiver, const std::vector<MessageId>& ids) const {
  Sends sends;
  for (const auto id : ids) {
    sends.push_back(sendTo(receiver, id));
    if (!sends.back()) throw Error(ErrorCode::kProtocol, "a backward pass through a message that was not recorded");
  }
  return sends;
}

void BackwardPass::mark(WorkerId from, const std::vector<MessageId>& ids, Done done) {
  const auto sends = sendsTo(from, ids);
  RecvFunctions received;
  {
    MutexLock lock(mutex_);
    source_workers_.insert(from);
    throwIfFailed(failure_);
    if (started_) throw Error(ErrorCode::kProtocol, "a backward pass that has begun cannot grow");
    received = addSends(sends);
  }
  sendMarks(received, std::move(done));
}

void BackwardPass::sendMarks(const RecvFunctions& received, Done done) {
  if (received.empty()) return done(std::nullopt);
  std::map<WorkerId, std::vector<MessageId>> by_worker;
  for (const auto* recv : received) by_worker[recv->sender()].push_back(recv->id());
  {
    MutexLock lock(mutex_);
    for (const auto& [worker, sends] : by_worker) reached_workers_.insert(worker);
  }
  struct Replies {
    const Done done;
    Mutex mutex;
    size_t outstanding TORCHRPC_GUARDED_BY(mutex);
    Status failure TORCHRPC_GUARDED_BY(mutex);

    Replies(Done done, size_t count) : done(std::move(done)), outstanding(count) {}
  };
  const auto replies = std::make_shared<Replies>(std::move(done), by_worker.size());
  for (auto& [worker, sends] : by_worker) {
    environment_.messenger.request(
        worker, encode(MarkRequest{header(), std::move(sends)}), kNoLimit, [replies](Result<Message> reply) {
          Status failure;
          {
            MutexLock lock(replies->mutex);
            if (!reply && !replies->failure) replies->failure = reply.error();
            if (--replies->outstanding > 0) return;
            failure = replies->failure;
          }
          replies->done(std::move(failure));
        });
  }
}

bool BackwardPass::planWithoutMarking(RecvFunctions& received) {
  const auto self = environment_.messenger.self().id;
  for (size_t i = 0; i < received.size(); ++i) {  // the loop appends to `received`
    const auto& recv = *received[i];
    if (!recv.dependencies()) return false;
    std::vector<MessageId> own;
    (recv.sender() == self ? own : planned_sends_[recv.sender()]).push_back(recv.id());
    for (const auto id : *recv.dependencies()) {
      if (makerOf(id) != self) return false;
      own.push_back(id);
    }
    const auto sends = sendsTo(recv.sender(), own);
    MutexLock lock(mutex_);
    const auto more = addSends(sends);
    received.insert(received.end(), more.begin(), more.end());
  }
  return true;
}

void BackwardPass::markDependencies(RecvFunctions received) {
  if (planWithoutMarking(received)) return;
  planned_sends_.clear();
  sendMarks(received, [self = shared_from_this()](Status failure) {
    {
      MutexLock lock(self->mutex_);
      self->all_marked_ = true;
      if (failure && !self->failure_) self->failure_ = std::move(failure);
    }
    self->notifyChanged();
  });
  waitUntil([this]() TORCHRPC_REQUIRES(mutex_) { return all_marked_ || failure_; });
}

// --- the local part ---

void BackwardPass::run(edge_list roots, variable_list gradients) try {
  runFrom(std::move(roots), std::move(gradients));
} catch (const Error&) {
  if (interrupt_exception_) std::rethrow_exception(interrupt_exception_);
  throw;
}

void BackwardPass::runFrom(edge_list roots, variable_list gradients) {
  const auto root = makeNode<SendFunction>(kNoAutogradId, std::move(roots));
  const auto sends = mode_ == BackwardMode::kFast ? context_->sends() : Sends();
  RecvFunctions received;
  {
    MutexLock lock(mutex_);
    received = graph_->add(root);
    addSends(sends);
  }
  try {
    if (mode_ == BackwardMode::kSmart) markDependencies(std::move(received));
  } catch (const Error& e) {
    fail(e);
    throw;
  }
  {
    MutexLock lock(mutex_);
    throwIfFailed(failure_);
    started_ = true;
  }
  graph_->setGradients(*root, std::move(gradients));
  try {
    runLocalPart();
    waitForEnd();
  } catch (const Error& e) {
    fail(e);
    throw;
  }
}

void BackwardPass::receive(WorkerId from, GradientRequest request, SendReply send_reply) {
  ReceivedGradients received{sendTo(from, request.gradients.send), std::move(request.gradients.gradients)};
  const auto taking_part = mode_ == BackwardMode::kFast ? context_->sends() : sendsTo(from, request.sends);
  Status rejected;
  bool starts = false;
  {
    MutexLock lock(mutex_);
    source_workers_.insert(from);
    if (!started_ && !ended_) addSends(taking_part);
    if (ended_ && failure_) {
      rejected = failure_;
    } else if (!accept(std::move(received))) {
      rejected = unexpectedGradients();
    } else if (!std::exchange(started_, true)) {
      starts = true;
      started_by_ = from;
      send_reply_ = std::move(send_reply);
    }
  }
  if (starts) return runLocalPart();
  notifyChanged();
  // It has been moved from only if `starts`. NOLINTNEXTLINE(bugprone-use-after-move)
  if (rejected) return send_reply(*std::move(rejected));
  send_reply(GradientReply());
}

bool BackwardPass::accept(ReceivedGradients received) {
  const auto& [send, gradients] = received;
  if (!send || gradients.size() != send->num_outputs() || awaiting_gradients_.erase(send->id()) == 0) return false;
  received_.push_back(std::move(received));
  return true;
}

bool BackwardPass::hasStarted() {
  MutexLock lock(mutex_);
  return started_;
}

void BackwardPass::runLocalPart() {
  const auto entered = environment_.enter_user_code();
  Status failure;
  const auto catch_failure = [&](const std::function<void()>& body) {
    try {
      body();
    } catch (const Error& e) {
      failure = e;
    } catch (...) {
      failure = environment_.to_error(std::current_exception());
    }
  };
  // Exceptions of nodes are converted inside the graph task: torch's engine would make a Python exception the thread's
  // current error.
  catch_failure([&] {
    graph_->runInGraphTask([&] {
      catch_failure([&] { runGraph(); });
      throwIfFailed(failure);
    });
  });
  loans_.clear();
  const auto computed = graph_->recordStreams();
  graph_.reset();
  if (failure) return fail(*std::move(failure));
  // Accumulated only now, so that a failed pass leaves no gradients here and gradients that share memory are copied.
  const at::NoGradGuard no_grad;
  UsedDevices::waitFor(computed);
  for (const auto& [leaf, gradient] : leaf_gradients_) context_->accumulate(leaf, gradient);
  leaf_gradients_.clear();
  {
    MutexLock lock(mutex_);
    graph_done_ = true;
  }
  finishIfDone();
}

void BackwardPass::runGraph() {
  while (auto received = nextGradients()) {
    for (auto& each : *received) graph_->setGradients(*each.send, std::move(each.gradients));
    if (!graph_->canRun()) continue;
    sendDeferred();
    graph_->runNext();
  }
  bool outstanding = false;
  {
    MutexLock lock(mutex_);
    outstanding = outstanding_ > 0;
  }
  if (outstanding) sendDeferred();
}

std::optional<std::vector<BackwardPass::ReceivedGradients>> BackwardPass::nextGradients() {
  {
    MutexLock lock(mutex_);
    throwIfFailed(failure_);
    if (!received_.empty() || graph_->canRun()) return std::exchange(received_, {});
    if (awaiting_gradients_.empty()) return std::nullopt;
  }
  sendDeferred();
  const auto has_news = [this]() TORCHRPC_REQUIRES(mutex_) { return !received_.empty() || failure_; };
  if (!waitUntil(has_news, progressDeadline())) throw noProgressError();
  MutexLock lock(mutex_);
  return std::exchange(received_, {});
}

void BackwardPass::waitForEnd() {
  for (size_t before = 0;;) {
    {
      MutexLock lock(mutex_);
      throwIfFailed(failure_);
      if (ended_) return;
      before = outstanding_;
    }
    const bool has_progressed = waitUntil(
        [&]() TORCHRPC_REQUIRES(mutex_) { return ended_ || failure_ || outstanding_ != before; }, progressDeadline());
    if (!has_progressed) throw noProgressError();
  }
}

TimePoint BackwardPass::progressDeadline() const {
  return mode_ == BackwardMode::kFast ? deadlineAfter(environment_.progress_timeout()) : kNever;
}

void BackwardPass::notifyChanged() {
  changed_.notify_all();
  futex_waiter_.notify();
}

bool BackwardPass::waitUntil(const std::function<bool()>& predicate, TimePoint deadline) {
  const ThreadPool::BlockingScope blocking;
  const auto is_done = [&] {
    MutexLock lock(mutex_);
    return predicate();
  };
  environment_.messenger.poll(is_done);
  const WaitScope waiting(ThreadWait{.kind = ThreadWait::Kind::kBackward});
  environment_.messenger.park(is_done, futex_waiter_, std::min(deadline, deadlineAfter(kSignalCheckInterval)));
  MutexLock lock(mutex_);
  try {
    if (!waitInterruptibly(changed_, lock, deadline, predicate)) return false;
  } catch (...) {
    interrupt_exception_ = std::current_exception();
    throw Error(ErrorCode::kBackward, "the backward pass was interrupted on " + environment_.messenger.self().name);
  }
  throwIfFailed(failure_);
  return true;
}

Error BackwardPass::noProgressError() {
  MutexLock lock(mutex_);
  const auto start =
      "RPC ran for more than set timeout: the backward pass of autograd context " + std::to_string(context_->id());
  if (awaiting_gradients_.empty()) {
    return {
        ErrorCode::kTimeout,
        start + " waits for " + std::to_string(outstanding_) +
            " answers of other workers, whose parts of it have not ended. Pass a longer rpc_timeout, or use "
            "mode=\"smart\", which waits as long as these workers live.",
        environment_.messenger.self().name};
  }
  return {
      ErrorCode::kTimeout,
      start + " still misses the gradients of " + std::to_string(awaiting_gradients_.size()) + " of the " +
          std::to_string(marked_.size()) + " messages with tensors that require grad which " +
          environment_.messenger.self().name +
          " has sent. In FAST mode every one of them must contribute to the loss: use mode=\"smart\", or detach "
          "what the loss does not use.",
      environment_.messenger.self().name};
}

// --- where gradients go ---

void BackwardPass::deliver(const RecvFunction& recv, variable_list gradients) {
  MessageGradients of_message{recv.id(), std::move(gradients), recv.sources()};
  bool defers = false;
  {
    MutexLock lock(mutex_);
    throwIfFailed(failure_);
    defers = started_by_ == recv.sender();
  }
  if (defers) {
    deferred_ = std::move(of_message);
    deferred_computed_ = UsedDevices::record();
  } else {
    send(recv.sender(), std::move(of_message));
  }
}

std::optional<MessageGradients> BackwardPass::takeDeferred() {
  UsedDevices::waitFor(std::exchange(deferred_computed_, nullptr));
  return std::exchange(deferred_, std::nullopt);
}

void BackwardPass::sendDeferred() {
  if (auto gradients = takeDeferred()) send(*started_by_, *std::move(gradients));
}

void BackwardPass::send(WorkerId to, MessageGradients gradients) {
  // The worker with the roots ends only when it has all its gradients, so this worker need not wait for its reply.
  const bool counted = to != makerOf(id_);
  {
    MutexLock lock(mutex_);
    throwIfFailed(failure_);
    if (counted) ++outstanding_;
    reached_workers_.insert(to);
  }
  const auto planned = planned_sends_.find(to);
  GradientRequest request{
      .pass = header(),
      .sends = planned == planned_sends_.end() ? std::vector<MessageId>() : planned->second,
      .gradients = std::move(gradients)};
  environment_.messenger.request(
      to, encode(request), kNoLimit,
      [to, counted, self = shared_from_this()](const Result<Message>& reply) { self->onReply(to, counted, reply); });
}

void BackwardPass::onReply(WorkerId from, bool counted, const Result<Message>& reply) {
  Status failure;
  try {
    if (!reply) throw reply.error();
    std::optional<ReceivedGradients> received;
    if (auto gradients = decodeGradientReply(reply.value()).gradients) {
      received = {sendTo(from, gradients->send), std::move(gradients->gradients)};
    }
    MutexLock lock(mutex_);
    if (received && !accept(*std::move(received))) throw unexpectedGradients();
    if (counted) --outstanding_;
  } catch (const Error& e) {
    failure = e;
  }
  if (failure) {
    // On the pool, because destroying the contents of the pass may need Python.
    environment_.messenger.post([self = shared_from_this(), failure] { self->fail(*failure); });
    return;
  }
  notifyChanged();
  finishIfDone();
}

std::shared_ptr<void> BackwardPass::lend(const AccumulateGrad& node) {
  const auto& leaf = node.variable;
  if (node.post_hooks().empty()) return std::make_shared<GradientLoan>(context_, leaf, GradientLoan::Scope::kNode);
  if (lent_leaves_.insert(leaf.unsafeGetTensorImpl()).second) {
    loans_.push_back(std::make_unique<GradientLoan>(context_, leaf, GradientLoan::Scope::kPass));
  }
  return nullptr;
}

// --- the end ---

void BackwardPass::finishIfDone() {
  SendReply send_reply;
  {
    MutexLock lock(mutex_);
    if (ended_ || !graph_done_ || outstanding_ > 0) return;
    ended_ = true;
    send_reply = std::move(send_reply_);
  }
  notifyChanged();
  context_->endPass(id_, std::nullopt);
  if (send_reply) send_reply(GradientReply{takeDeferred()});
}

void BackwardPass::fail(Error error) {
  SendReply send_reply;
  std::set<WorkerId> reached;
  bool late = false;
  {
    MutexLock lock(mutex_);
    if (ended_ && failure_) return;
    late = std::exchange(ended_, true);
    failure_ = error;
    send_reply = std::move(send_reply_);
    reached = std::move(reached_workers_);
  }
  // The pass has ended here, but gradients that it sent to the worker with the roots were not delivered.
  if (late) return sendAborts({makerOf(id_)}, error);
  notifyChanged();
  context_->endPass(id_, error);
  sendAborts(reached, error);
  if (send_reply) send_reply(std::move(error));
}

void BackwardPass::sendAborts(const std::set<WorkerId>& workers, const Error& reason) {
  for (const auto worker : workers) {
    if (worker == environment_.messenger.self().id) continue;  // this object is that worker's part
    environment_.messenger.requestReliably(
        worker, encode(AbortRequest{header(), reason}), [](const Result<Message>&) {});
  }
}

void BackwardPass::onWorkerLost(const WorkerInfo& worker) {
  {
    MutexLock lock(mutex_);
    if (!source_workers_.contains(worker.id) && !reached_workers_.contains(worker.id)) return;
  }
  fail(Error(
      ErrorCode::kWorkerLost,
      toString(worker) + " was lost during the backward pass of autograd context " + std::to_string(context_->id()),
      worker.name));
}

}  // namespace torchrpc
