#include "autograd/backward_pass.h"

#include <ATen/core/grad_mode.h>

#include "base/executor/thread_pool.h"
#include "base/sync/interrupt.h"

namespace torchrpc {

using torch::autograd::AccumulateGrad;

namespace {

Error notAwaited() { return {ErrorCode::kProtocol, "gradients that the backward pass does not wait for"}; }

}  // namespace

BackwardPass::BackwardPass(
    const Environment& environment, ContextPtr context, PassId id, BackwardMode mode, bool retain_graph)
    : environment_(environment), context_(std::move(context)), id_(id), mode_(mode), retain_graph_(retain_graph) {
  graph_.emplace(
      retain_graph,
      LocalGraph::Exits{
          .deliver = [this](const RecvFunction& recv, variable_list gradients) { deliver(recv, std::move(gradients)); },
          .accumulate = [this](
                            const at::Tensor& leaf,
                            at::Tensor gradient) { captured_.emplace_back(leaf, std::move(gradient)); },
          .lend = [this](const AccumulateGrad& leaf) { return lend(leaf); },
      });
}

// --- which send functions take part ---

BackwardPass::Received BackwardPass::addSends(const Sends& sends) {
  Received received;
  for (const auto& send : sends) {
    if (!marked_.insert(send->id()).second) continue;
    missing_.insert(send->id());
    const auto more = graph_->add(send);
    received.insert(received.end(), more.begin(), more.end());
  }
  return received;
}

BackwardPass::Sends BackwardPass::sendsOf(const std::vector<MessageId>& ids) const {
  Sends sends;
  for (const auto id : ids) {
    sends.push_back(context_->send(id));
    if (!sends.back()) throw Error(ErrorCode::kProtocol, "a backward pass through a message that was not recorded");
  }
  return sends;
}

void BackwardPass::mark(WorkerId from, const std::vector<MessageId>& ids, Done done) {
  const auto sends = sendsOf(ids);
  Received received;
  {
    MutexLock lock(mutex_);
    heard_from_.insert(from);
    throwIfFailed(failure_);
    if (began_) throw Error(ErrorCode::kProtocol, "a backward pass that has begun cannot grow");
    received = addSends(sends);
  }
  markOthers(received, std::move(done));
}

void BackwardPass::markOthers(const Received& received, Done done) {
  if (received.empty()) return done(std::nullopt);
  std::map<WorkerId, std::vector<MessageId>> by_worker;
  for (const auto* recv : received) by_worker[recv->sender()].push_back(recv->id());
  {
    MutexLock lock(mutex_);
    for (const auto& [worker, sends] : by_worker) reached_.insert(worker);
  }
  struct Answers {
    Done done;
    Mutex mutex;
    // guarded by mutex:
    size_t missing;
    Status failure;
  };
  auto answers = std::make_shared<Answers>();
  answers->done = std::move(done);
  answers->missing = by_worker.size();
  for (auto& [worker, sends] : by_worker) {
    environment_.messenger.request(
        worker, encode(MarkRequest{header(), std::move(sends)}), Duration::zero(), [answers](Result<Message> reply) {
          Status failure;
          {
            MutexLock lock(answers->mutex);
            if (!reply && !answers->failure) answers->failure = reply.error();
            if (--answers->missing > 0) return;
            failure = answers->failure;
          }
          answers->done(std::move(failure));
        });
  }
}

bool BackwardPass::plan(Received& received) {
  const auto self = environment_.messenger.self().id;
  for (size_t i = 0; i < received.size(); ++i) {  // it grows
    const auto& recv = *received[i];
    if (!recv.dependencies()) return false;
    std::vector<MessageId> own;
    (recv.sender() == self ? own : plan_[recv.sender()]).push_back(recv.id());
    for (const auto id : *recv.dependencies()) {
      if (makerOf(id) != self) return false;
      own.push_back(id);
    }
    const auto sends = sendsOf(own);
    MutexLock lock(mutex_);
    const auto more = addSends(sends);
    received.insert(received.end(), more.begin(), more.end());
  }
  return true;
}

void BackwardPass::markFrom(Received received) {
  if (plan(received)) return;
  plan_.clear();
  markOthers(received, [self = shared_from_this()](Status failure) {
    {
      MutexLock lock(self->mutex_);
      self->all_marked_ = true;
      if (failure && !self->failure_) self->failure_ = std::move(failure);
    }
    self->tellChanged();
  });
  waitUntil([this] { return all_marked_ || failure_; });
}

// --- the work ---

void BackwardPass::run(edge_list roots, variable_list gradients) try {
  runFrom(std::move(roots), std::move(gradients));
} catch (const Error&) {
  if (interrupt_) std::rethrow_exception(interrupt_);
  throw;
}

void BackwardPass::runFrom(edge_list roots, variable_list gradients) {
  const auto root = c10::make_intrusive<SendFunction>(kNoAutogradId, std::move(roots));
  const auto sends = mode_ == BackwardMode::kFast ? context_->sends() : Sends();
  Received received;
  {
    MutexLock lock(mutex_);
    received = graph_->add(root);
    addSends(sends);
  }
  try {
    if (mode_ == BackwardMode::kSmart) markFrom(std::move(received));
  } catch (const Error& e) {
    fail(e);
    throw;
  }
  {
    MutexLock lock(mutex_);
    throwIfFailed(failure_);
    began_ = true;
  }
  graph_->give(*root, std::move(gradients));
  try {
    work();
    waitUntil([this] { return ended_; });
  } catch (const Error& e) {
    fail(e);
    throw;
  }
}

void BackwardPass::receive(WorkerId from, GradientRequest request, Answer answer) {
  Arrival arrival{context_->send(request.gradients.send), std::move(request.gradients.gradients)};
  const auto taking_part = mode_ == BackwardMode::kFast ? context_->sends() : sendsOf(request.sends);
  Status refused;
  bool begins = false;
  {
    MutexLock lock(mutex_);
    heard_from_.insert(from);
    if (!began_ && !ended_) addSends(taking_part);
    if (ended_ && failure_) {
      refused = failure_;
    } else if (!accept(std::move(arrival))) {
      refused = notAwaited();
    } else if (!std::exchange(began_, true)) {
      begins = true;
      began_by_ = from;
      answer_ = std::move(answer);
    }
  }
  if (begins) return work();
  tellChanged();
  if (refused) return answer(*std::move(refused));
  answer(GradientReply());
}

bool BackwardPass::accept(Arrival arrival) {
  const auto& [send, gradients] = arrival;
  if (!send || gradients.size() != send->num_outputs() || missing_.erase(send->id()) == 0) return false;
  arrived_.push_back(std::move(arrival));
  return true;
}

bool BackwardPass::isAtWork() {
  MutexLock lock(mutex_);
  return began_;
}

void BackwardPass::work() {
  const auto entered = environment_.enter_user_code();
  Status failure;
  const auto note = [&](const std::function<void()>& body) {
    try {
      body();
    } catch (const Error& e) {
      failure = e;
    } catch (...) {
      failure = environment_.to_error(std::current_exception());
    }
  };
  // What nodes throw is looked at before torch's engine, which makes a Python exception the thread's current error.
  note([&] {
    graph_->runInGraphTask([&] {
      note([&] { runGraph(); });
      throwIfFailed(failure);
    });
  });
  loans_.clear();
  graph_.reset();
  if (failure) return fail(*std::move(failure));
  // Only now, so that a pass that fails leaves nothing here, and that gradients which share memory are copied.
  const at::NoGradGuard no_grad;
  for (const auto& [leaf, gradient] : captured_) context_->accumulate(leaf, gradient);
  captured_.clear();
  {
    MutexLock lock(mutex_);
    worked_ = true;
  }
  finishIfDone();
}

void BackwardPass::runGraph() {
  while (auto arrivals = nextArrivals()) {
    for (auto& arrival : *arrivals) graph_->give(*arrival.send, std::move(arrival.gradients));
    if (!graph_->canRun()) continue;
    sendHeld();
    graph_->runNext();
  }
  bool others_work = false;
  {
    MutexLock lock(mutex_);
    others_work = outstanding_ > 0;
  }
  if (others_work) sendHeld();
}

std::optional<std::vector<BackwardPass::Arrival>> BackwardPass::nextArrivals() {
  {
    MutexLock lock(mutex_);
    throwIfFailed(failure_);
    if (!arrived_.empty() || graph_->canRun()) return std::exchange(arrived_, {});
    if (missing_.empty()) return std::nullopt;
  }
  sendHeld();
  const auto patience = mode_ == BackwardMode::kFast ? environment_.patience() : Duration::zero();
  const auto deadline = patience > Duration::zero() ? deadlineAfter(patience) : kNever;
  if (!waitUntil([this] { return !arrived_.empty() || failure_; }, deadline)) throw impatience();
  MutexLock lock(mutex_);
  return std::exchange(arrived_, {});
}

void BackwardPass::tellChanged() {
  changed_.notify_all();
  futex_waiter_.ring();
}

bool BackwardPass::waitUntil(const std::function<bool()>& over, TimePoint deadline) {
  const ThreadPool::BlockingScope blocking;
  const auto is_over = [&] {
    MutexLock lock(mutex_);
    return over();
  };
  environment_.messenger.poll(is_over);
  environment_.messenger.sleep(is_over, futex_waiter_, std::min(deadline, deadlineAfter(kSignalCheckInterval)));
  MutexLock lock(mutex_);
  try {
    if (!waitInterruptibly(changed_, lock, deadline, over)) return false;
  } catch (...) {
    interrupt_ = std::current_exception();
    throw Error(ErrorCode::kBackward, "the backward pass was interrupted on " + environment_.messenger.self().name);
  }
  throwIfFailed(failure_);
  return true;
}

Error BackwardPass::impatience() {
  MutexLock lock(mutex_);
  return {
      ErrorCode::kTimeout,
      "RPC ran for more than set timeout: the backward pass of autograd context " + std::to_string(context_->id()) +
          " still misses the gradients of " + std::to_string(missing_.size()) + " of the " +
          std::to_string(marked_.size()) + " messages with tensors that require grad which " +
          environment_.messenger.self().name +
          " has sent. In FAST mode every one of them must contribute to the loss: use mode=\"smart\", or detach "
          "what the loss does not use.",
      environment_.messenger.self().name};
}

// --- where gradients go ---

void BackwardPass::deliver(const RecvFunction& recv, variable_list gradients) {
  MessageGradients of_message{recv.id(), std::move(gradients)};
  bool answers = false;
  {
    MutexLock lock(mutex_);
    throwIfFailed(failure_);
    answers = began_by_ == recv.sender();
  }
  if (answers) {
    held_ = std::move(of_message);
  } else {
    send(recv.sender(), std::move(of_message));
  }
}

void BackwardPass::sendHeld() {
  if (!held_) return;
  auto gradients = *std::exchange(held_, std::nullopt);
  send(*began_by_, std::move(gradients));
}

void BackwardPass::send(WorkerId to, MessageGradients gradients) {
  // The worker with the roots waits for its gradients anyway: nobody needs to wait for its answer.
  const bool awaited = to != makerOf(id_);
  {
    MutexLock lock(mutex_);
    throwIfFailed(failure_);
    if (awaited) ++outstanding_;
    reached_.insert(to);
  }
  const auto planned = plan_.find(to);
  GradientRequest request{
      .pass = header(),
      .sends = planned == plan_.end() ? std::vector<MessageId>() : planned->second,
      .gradients = std::move(gradients)};
  environment_.messenger.request(
      to, encode(request), Duration::zero(),
      [awaited, self = shared_from_this()](const Result<Message>& reply) { self->onAnswer(awaited, reply); });
}

void BackwardPass::onAnswer(bool awaited, const Result<Message>& reply) {
  Status failure;
  try {
    if (!reply) throw reply.error();
    auto with = decodeGradientReply(reply.value()).gradients;
    auto arrival = with ? std::optional(Arrival{context_->send(with->send), std::move(with->gradients)}) : std::nullopt;
    MutexLock lock(mutex_);
    if (arrival && !accept(*std::move(arrival))) throw notAwaited();
    if (awaited) --outstanding_;
  } catch (const Error& e) {
    failure = e;
  }
  if (failure) {
    // On the pool: what goes with the pass may need Python.
    environment_.messenger.post([self = shared_from_this(), failure] { self->fail(*failure); });
    return;
  }
  tellChanged();
  finishIfDone();
}

std::shared_ptr<void> BackwardPass::lend(const AccumulateGrad& node) {
  const auto& leaf = node.variable;
  if (node.post_hooks().empty()) return std::make_shared<GradLoan>(context_, leaf, GradLoan::Length::kNode);
  if (lent_.insert(leaf.unsafeGetTensorImpl()).second) {
    loans_.push_back(std::make_unique<GradLoan>(context_, leaf, GradLoan::Length::kPass));
  }
  return nullptr;
}

// --- the end ---

void BackwardPass::finishIfDone() {
  Answer answer;
  {
    MutexLock lock(mutex_);
    if (ended_ || !worked_ || outstanding_ > 0) return;
    ended_ = true;
    answer = std::move(answer_);
  }
  tellChanged();
  context_->endPass(id_, std::nullopt);
  if (answer) answer(GradientReply{std::exchange(held_, std::nullopt)});
}

void BackwardPass::fail(Error error) {
  Answer answer;
  std::set<WorkerId> reached;
  bool late = false;
  {
    MutexLock lock(mutex_);
    if (ended_ && failure_) return;
    late = std::exchange(ended_, true);
    failure_ = error;
    answer = std::move(answer_);
    reached = std::move(reached_);
  }
  // Gradients that nobody waited for here did not arrive where somebody does.
  if (late) return tellAbort({makerOf(id_)}, error);
  tellChanged();
  context_->endPass(id_, error);
  tellAbort(reached, error);
  if (answer) answer(std::move(error));
}

void BackwardPass::tellAbort(const std::set<WorkerId>& workers, const Error& reason) {
  for (const auto worker : workers) {
    if (worker == environment_.messenger.self().id) continue;  // it is this very pass
    environment_.messenger.requestReliably(
        worker, encode(AbortRequest{header(), reason}), [](const Result<Message>&) {});
  }
}

void BackwardPass::onWorkerLost(const WorkerInfo& worker) {
  {
    MutexLock lock(mutex_);
    if (!heard_from_.contains(worker.id) && !reached_.contains(worker.id)) return;
  }
  fail(Error(
      ErrorCode::kWorkerLost,
      toString(worker) + " was lost during the backward pass of autograd context " + std::to_string(context_->id()),
      worker.name));
}

}  // namespace torchrpc
