#include "optim/distributed_optimizer.h"

#include <atomic>

#include "base/sync/waiter.h"

namespace torchrpc {

namespace {

/// Calls `done` with the results of several requests when the last has come.
template <typename T>
class Gathering {
 public:
  using All = std::vector<Result<T>>;
  using Done = std::function<void(All)>;

  Gathering(size_t count, Done done) : waiting_(count), results_(count), done_(std::move(done)) {}

  void arrive(size_t i, Result<T> result) {
    {
      MutexLock lock(mutex_);
      results_[i] = std::move(result);
      if (--waiting_ > 0) return;
    }
    All all;
    for (auto& each : results_) all.push_back(*std::move(each));
    done_(std::move(all));
  }

 private:
  Mutex mutex_;
  // guarded by mutex_, constant once nothing is waited for:
  size_t waiting_;
  std::vector<std::optional<Result<T>>> results_;
  const Done done_;
};

Error failedOn(const WorkerInfo& owner, const char* what, const Error& error) {
  return {
      error.code(), std::string(what) + " of the optimizer on " + owner.name + ": " + error.text(), owner.name,
      error.detail()};
}

}  // namespace

struct DistributedOptimizer::Part {
  WorkerInfo owner;
  std::vector<size_t> params;  ///< their places among all
  RRefPtr optimizer;
  std::atomic<uint64_t> acknowledged{0};  ///< the last revision of the options that it is known to have
};

DistributedOptimizer::DistributedOptimizer(
    OptimService& service, std::string kind, std::vector<Group> groups, Settings settings)
    : service_(service), kind_(std::move(kind)), timeout_(settings.timeout) {
  for (const auto& group : groups) {
    makeAlgorithm(kind_, group.options, Ranges::kChecked);  // what is wrong is told before anything is sent
    options_.push_back(group.options);
  }
  create(groups, settings.lock_free);
  if (params_ == 0) throwInvalidArgument("optimizer got an empty parameter list");
}

DistributedOptimizer::~DistributedOptimizer() = default;

void DistributedOptimizer::create(const std::vector<Group>& groups, bool lock_free) {
  std::vector<OptimCreate> requests;
  std::vector<std::vector<RRefPtr>> params;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const auto& rref : groups[g].params) {
      if (!rref) throwInvalidArgument("parameter " + std::to_string(params_) + " is no RRef");
      size_t at = 0;
      while (at < parts_.size() && parts_[at]->owner.id != rref->owner().id) ++at;
      if (at == parts_.size()) {
        parts_.push_back(std::make_shared<Part>());
        parts_[at]->owner = rref->owner();
        params.emplace_back();
        auto& request = requests.emplace_back(OptimCreate{.kind = kind_, .lock_free = lock_free});
        for (const auto& options : options_) request.groups.push_back({.options = options});
      }
      parts_[at]->params.push_back(params_++);
      params[at].push_back(rref);
      ++requests[at].groups[g].params;
    }
  }
  if (parts_.empty()) return;
  auto created = waitFor<Gathering<RRefPtr>::All>([&](auto done) {
    const auto gathering = std::make_shared<Gathering<RRefPtr>>(parts_.size(), std::move(done));
    for (size_t i = 0; i < parts_.size(); ++i) {
      service_.create(parts_[i]->owner, requests[i], params[i], timeout_, [gathering, i](Result<RRefPtr> rref) {
        gathering->arrive(i, std::move(rref));
      });
    }
  });
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (!created[i]) throw failedOn(parts_[i]->owner, "creation", created[i].error());
    parts_[i]->optimizer = std::move(created[i]).value();
  }
}

void DistributedOptimizer::ask(
    const char* what, const std::function<Message(const Part&)>& question, RepliesHandler done) {
  const auto gathering = std::make_shared<Gathering<Message>>(parts_.size(), std::move(done));
  for (size_t i = 0; i < parts_.size(); ++i) {
    const auto& part = parts_[i];
    service_.request(part->optimizer, question(*part), timeout_, [gathering, i, part, what](Result<Message> reply) {
      gathering->arrive(i, reply ? std::move(reply) : failedOn(part->owner, what, reply.error()));
    });
  }
}

DistributedOptimizer::Replies DistributedOptimizer::askAndWait(
    const char* what, const std::function<Message(const Part&)>& question) {
  auto replies = waitFor<Replies>([&](auto done) { ask(what, question, std::move(done)); });
  for (const auto& reply : replies) {
    if (!reply) throw reply.error();
  }
  return replies;
}

void DistributedOptimizer::setOptions(const std::vector<Options>& groups) {
  MutexLock lock(mutex_);
  if (groups.size() != options_.size()) {
    throwInvalidArgument(
        "there are " + std::to_string(options_.size()) + " groups of parameters, but options of " +
        std::to_string(groups.size()));
  }
  auto merged = groups;
  for (size_t i = 0; i < groups.size(); ++i) {
    merged[i].insert(options_[i].begin(), options_[i].end());
    makeAlgorithm(kind_, merged[i], Ranges::kFree);
  }
  options_ = std::move(merged);
  ++revision_;
}

void DistributedOptimizer::stepAsync(int64_t context, std::function<void(Status)> done) {
  service_.checkContext(context);
  uint64_t revision;
  std::vector<Options> options;
  {
    MutexLock lock(mutex_);
    revision = revision_;
    options = options_;
  }
  const auto question = [&](const Part& part) {
    OptimStep step{.optimizer = OptimService::nameOf(*part.optimizer), .context = context, .revision = revision};
    if (part.acknowledged != revision) step.options = options;
    return encode(step);
  };
  ask("step", question, [parts = parts_, revision, done = std::move(done)](const Replies& replies) {
    Status failure;
    for (size_t i = 0; i < parts.size(); ++i) {
      if (replies[i]) {
        parts[i]->acknowledged = revision;
      } else if (!failure) {
        failure = replies[i].error();
      }
    }
    done(std::move(failure));
  });
}

void DistributedOptimizer::step(int64_t context) {
  const auto failure = waitFor<Status>([&](auto done) { stepAsync(context, std::move(done)); });
  if (failure) throw *failure;
}

std::vector<ParamState> DistributedOptimizer::state() {
  const auto replies =
      askAndWait("state", [](const Part& part) { return encodeOptimState(OptimService::nameOf(*part.optimizer)); });
  std::vector<ParamState> all(params_);
  for (size_t i = 0; i < parts_.size(); ++i) {
    auto states = decodeStates(replies[i].value());
    const auto& params = parts_[i]->params;
    if (states.size() != params.size()) {
      throw Error(ErrorCode::kProtocol, "malformed message: not the state of each parameter", parts_[i]->owner.name);
    }
    for (size_t j = 0; j < params.size(); ++j) all[params[j]] = std::move(states[j]);
  }
  return all;
}

void DistributedOptimizer::load(const std::vector<ParamState>& states) {
  if (states.size() != params_) {
    throwInvalidArgument(
        "there are " + std::to_string(params_) + " parameters, but states of " + std::to_string(states.size()));
  }
  askAndWait("loading", [&](const Part& part) {
    std::vector<ParamState> its;
    for (const size_t param : part.params) its.push_back(states[param]);
    return encodeOptimLoad(OptimService::nameOf(*part.optimizer), its);
  });
}

std::vector<RRefPtr> DistributedOptimizer::remoteOptimizers() const {
  std::vector<RRefPtr> out;
  for (const auto& part : parts_) out.push_back(part->optimizer);
  return out;
}

}  // namespace torchrpc
