#include "optim/distributed_optimizer.h"

#include <atomic>

#include "base/sync/waiter.h"
#include "optim/result_collector.h"

namespace torchrpc {

namespace {

Error failedOn(const WorkerInfo& owner, const char* action, const Error& error) {
  return {
      error.code(), std::string(action) + " of the optimizer on " + owner.name + ": " + error.text(), owner.name,
      error.detail()};
}

}  // namespace

struct DistributedOptimizer::Part {
  WorkerInfo owner;
  std::vector<size_t> params;  ///< their indices among all parameters
  RRefPtr optimizer;
  std::atomic<uint64_t> confirmed_revision{0};  ///< of the latest options that the owner has confirmed
};

DistributedOptimizer::DistributedOptimizer(
    OptimService& service, std::string kind, const std::vector<Group>& groups, Settings settings)
    : service_(service), kind_(std::move(kind)), timeout_(settings.timeout) {
  for (const auto& group : groups) {
    makeAlgorithm(kind_, group.options, Ranges::kChecked);  // reports errors before a message is sent
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
      size_t part = 0;
      while (part < parts_.size() && parts_[part]->owner.id != rref->owner().id) ++part;
      if (part == parts_.size()) {
        parts_.push_back(std::make_shared<Part>());
        parts_[part]->owner = rref->owner();
        params.emplace_back();
        auto& request = requests.emplace_back(OptimCreate{.kind = kind_, .lock_free = lock_free});
        for (const auto& group : groups) request.groups.push_back({.options = group.options});
      }
      parts_[part]->params.push_back(params_++);
      params[part].push_back(rref);
      ++requests[part].groups[g].params;
    }
  }
  if (parts_.empty()) return;
  auto created = waitFor<ResultCollector<RRefPtr>::Results>([&](auto done) {
    const auto collector = std::make_shared<ResultCollector<RRefPtr>>(parts_.size(), std::move(done));
    for (size_t i = 0; i < parts_.size(); ++i) {
      service_.create(parts_[i]->owner, requests[i], params[i], timeout_, [collector, i](Result<RRefPtr> rref) {
        collector->set(i, std::move(rref));
      });
    }
  });
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (!created[i]) throw failedOn(parts_[i]->owner, "creation", created[i].error());
    parts_[i]->optimizer = std::move(created[i]).value();
  }
}

void DistributedOptimizer::requestAll(
    const char* action, const std::function<Message(const Part&)>& encode, RepliesHandler done) {
  const auto collector = std::make_shared<ResultCollector<Message>>(parts_.size(), std::move(done));
  for (size_t i = 0; i < parts_.size(); ++i) {
    const auto& part = parts_[i];
    service_.request(part->optimizer, encode(*part), timeout_, [collector, i, part, action](Result<Message> reply) {
      collector->set(i, reply ? std::move(reply) : failedOn(part->owner, action, reply.error()));
    });
  }
}

DistributedOptimizer::Replies DistributedOptimizer::requestAllAndWait(
    const char* action, const std::function<Message(const Part&)>& encode) {
  auto replies = waitFor<Replies>([&](auto done) { requestAll(action, encode, std::move(done)); });
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
    makeAlgorithm(kind_, merged[i], Ranges::kUnchecked);
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
  const auto encode_step = [&](const Part& part) {
    OptimStep step{.optimizer = OptimService::nameOf(*part.optimizer), .context = context, .revision = revision};
    if (part.confirmed_revision != revision) step.options = options;
    return encode(step);
  };
  requestAll("step", encode_step, [parts = parts_, revision, done = std::move(done)](const Replies& replies) {
    Status failure;
    for (size_t i = 0; i < parts.size(); ++i) {
      if (replies[i]) {
        parts[i]->confirmed_revision = revision;
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
  const auto replies = requestAllAndWait(
      "state", [](const Part& part) { return encodeOptimState(OptimService::nameOf(*part.optimizer)); });
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
  requestAllAndWait("loading", [&](const Part& part) {
    std::vector<ParamState> part_states;
    for (const size_t param : part.params) part_states.push_back(states[param]);
    return encodeOptimLoad(OptimService::nameOf(*part.optimizer), part_states);
  });
}

std::vector<RRefPtr> DistributedOptimizer::remoteOptimizers() const {
  std::vector<RRefPtr> out;
  for (const auto& part : parts_) out.push_back(part->optimizer);
  return out;
}

}  // namespace torchrpc
