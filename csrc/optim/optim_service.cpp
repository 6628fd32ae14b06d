#include "optim/optim_service.h"

#include <unordered_map>

namespace torchrpc {

namespace {

/// What a handler throws, as the error that answers.
template <typename F>
void guarded(const Responder& responder, const WorkerInfo& self, F&& body) {
  try {
    body();
  } catch (const Error& error) {
    responder.fail(error);
  } catch (const c10::Error& error) {
    responder.fail(Error(ErrorCode::kUserException, error.what_without_backtrace(), self.name));
  } catch (const std::exception& error) {
    responder.fail(Error(ErrorCode::kUserException, error.what(), self.name));
  }
}

/// Calls `done` once with the values of all, or with the first error among them.
class Values : public std::enable_shared_from_this<Values> {
 public:
  using Done = std::function<void(Result<std::vector<c10::IValue>>)>;
  Values(size_t count, Done done) : waiting_(count), values_(count), done_(std::move(done)) {}

  void waitFor(const std::vector<RRefPtr>& rrefs) {
    if (rrefs.empty()) return done_(std::vector<c10::IValue>());
    for (size_t i = 0; i < rrefs.size(); ++i) {
      std::static_pointer_cast<OwnerRRef>(rrefs[i])->whenReady(
          [self = shared_from_this(), i](const Result<c10::IValue>& value) { self->arrive(i, value); });
    }
  }

 private:
  void arrive(size_t i, const Result<c10::IValue>& value) {
    {
      MutexLock lock(mutex_);
      if (value) {
        values_[i] = value.value();
      } else if (!failure_) {
        failure_ = value.error();
      }
      if (--waiting_ > 0) return;
    }
    failure_ ? done_(*failure_) : done_(std::move(values_));
  }

  Mutex mutex_;
  // guarded by mutex_, constant once nothing is waited for:
  size_t waiting_;
  Status failure_;
  std::vector<c10::IValue> values_;
  const Done done_;
};

/// The tensor that a value is, itself or as an object of a language above.
at::Tensor tensorIn(const c10::IValue& value, size_t param, const WorkerInfo& self) {
  auto tensor = value;
  if (value.isPyObject()) {
    try {
      tensor = value.toPyObjectHolder()->toIValue(c10::TensorType::get());
    } catch (const std::exception&) {  // no tensor
    }
  }
  if (tensor.isTensor()) return tensor.toTensor();
  throw Error(
      ErrorCode::kInvalidArgument,
      "optimizer can only optimize Tensors, but the RRef of parameter " + std::to_string(param) + " on " + self.name +
          " holds a value of type " + value.tagKind() + ": give RRefs to the parameters, not to a module",
      self.name);
}

Optimizer& optimizerIn(const c10::IValue& value, const WorkerInfo& self) {
  const auto holder = value.isCapsule() ? value.toCapsule() : nullptr;
  if (auto* optimizer = dynamic_cast<Optimizer*>(holder.get())) return *optimizer;
  throw Error(ErrorCode::kInvalidArgument, "the RRef of " + self.name + " is not of an optimizer", self.name);
}

}  // namespace

OptimService::OptimService(Messenger& messenger, RRefService& rrefs, Gradients gradients)
    : messenger_(messenger), rrefs_(rrefs), gradients_(std::move(gradients)) {
  const auto serve = [this](Kind kind, void (OptimService::*handler)(const Request&, const Responder&)) {
    messenger_.on(kind, Messenger::Where::kPool, [this, handler](const Request& request, const Responder& responder) {
      guarded(responder, messenger_.self(), [&] { (this->*handler)(request, responder); });
    });
  };
  serve(Kind::kOptimCreate, &OptimService::serveCreate);
  for (const auto kind : {Kind::kOptimStep, Kind::kOptimState, Kind::kOptimLoad}) {
    serve(kind, &OptimService::serveRequest);
  }
}

// --- the client's side ---

void OptimService::create(
    const WorkerInfo& owner, const OptimCreate& what, const std::vector<RRefPtr>& params, Duration timeout,
    Created done) {
  auto message = encode(what);
  std::vector<RRefFork> forks;
  try {
    for (const auto& param : params) forks.push_back(rrefs_.fork(param, owner.id));
  } catch (const Error& error) {
    rrefs_.abandon(forks);
    return done(error);
  }
  message.headers.push_back({HeaderKind::kRRefForks, encodeForks(forks)});
  messenger_.request(
      owner.id, std::move(message), timeout,
      [this, params, forks = std::move(forks), done = std::move(done)](Result<Message> reply) {
        if (!reply) {
          rrefs_.abandon(forks);  // they went to their owner, who needs no protection for them if they did arrive
          return done(reply.error());
        }
        const auto* header = reply.value().header(HeaderKind::kRRefForks);
        const Error none(ErrorCode::kProtocol, "malformed message: an optimizer without its RRef");
        if (!header) return done(none);
        try {
          rrefs_.adopt(
              decodeForks(*header), /*wait_for_owner=*/false, [done, none](Result<std::vector<RRefPtr>> rrefs) {
                if (!rrefs) return done(rrefs.error());
                if (rrefs.value().size() != 1) return done(none);
                done(rrefs.value().front());
              });
        } catch (const Error& error) {
          done(error);
        }
      });
}

void OptimService::request(const RRefPtr& optimizer, Message message, Duration timeout, Messenger::ReplyHandler done) {
  if (auto owner = std::dynamic_pointer_cast<OwnerRRef>(optimizer)) {
    // Ours: nothing travels. The responder completes `done` with what is thrown, too.
    messenger_.post([this, owner, message = std::move(message), responder = Responder(std::move(done))] {
      guarded(responder, messenger_.self(), [&] {
        const auto value = owner->wait(Duration::zero());
        responder.reply(perform(optimizerIn(value, messenger_.self()), message));
      });
    });
    return;
  }
  const auto user = std::static_pointer_cast<UserRRef>(optimizer);
  if (const auto failure = user->failure()) return done(*failure);
  messenger_.request(
      optimizer->owner().id, std::move(message), timeout,
      [optimizer, done = std::move(done)](Result<Message> reply) { done(std::move(reply)); });
}

std::string OptimService::nameOf(const RRef& optimizer) {
  const auto* user = dynamic_cast<const UserRRef*>(&optimizer);
  return user ? RRefService::encodeName(*user) : "";
}

// --- the owner's side ---

void OptimService::serveCreate(const Request& request, const Responder& responder) {
  const auto* header = request.message.header(HeaderKind::kRRefForks);
  const auto forks = header ? decodeForks(*header) : std::vector<RRefFork>();
  auto build = [this, request, responder](std::vector<c10::IValue> params) {
    messenger_.post([this, request, responder, params = std::move(params)] {
      guarded(responder, messenger_.self(), [&] {
        host(request.from, decodeOptimCreate(request.message), params, responder);
      });
    });
  };
  rrefs_.adopt(
      forks, /*wait_for_owner=*/true,
      [this, responder, build = std::move(build)](const Result<std::vector<RRefPtr>>& params) {
        if (!params) return responder.fail(params.error());
        for (const auto& param : params.value()) {
          if (param->isOwner()) continue;
          return responder.fail(Error(
              ErrorCode::kInvalidArgument,
              messenger_.self().name + " cannot step a parameter that " + param->owner().name + " owns"));
        }
        std::make_shared<Values>(params.value().size(), [responder, build](Result<std::vector<c10::IValue>> values) {
          values ? build(std::move(values).value()) : responder.fail(values.error());
        })->waitFor(params.value());
      });
}

void OptimService::host(
    const WorkerInfo& creator, const OptimCreate& what, const std::vector<c10::IValue>& params,
    const Responder& responder) {
  std::vector<Optimizer::Group> groups;
  size_t next = 0;
  for (const auto& group : what.groups) {
    if (group.params > params.size() - next) {
      throw Error(ErrorCode::kProtocol, "malformed message about an optimizer: fewer RRefs than parameters");
    }
    auto& out = groups.emplace_back();
    out.options = group.options;
    for (size_t end = next + group.params; next < end; ++next) {
      out.params.push_back(tensorIn(params[next], next, messenger_.self()));
    }
  }
  if (next != params.size()) {
    throw Error(ErrorCode::kProtocol, "malformed message about an optimizer: more RRefs than parameters");
  }
  const auto turn = what.lock_free ? nullptr : loop_mutex_;
  const auto rref = rrefs_.createOwner();
  rref->setValue(c10::IValue::make_capsule(c10::make_intrusive<Optimizer>(what.kind, std::move(groups), turn)));
  Message reply{.kind = Kind::kReply};
  reply.headers.push_back({HeaderKind::kRRefForks, encodeForks({rrefs_.fork(rref, creator.id)})});
  responder.reply(std::move(reply));
}

void OptimService::serveRequest(const Request& request, const Responder& responder) {
  const auto rref = rrefs_.findNamed(decodeOptimTarget(request.message)).take();
  const auto value = rref->wait(Duration(1));  // an optimizer's RRef is ready from the start
  responder.reply(perform(optimizerIn(value, messenger_.self()), request.message));
}

Message OptimService::perform(Optimizer& optimizer, const Message& message) {
  switch (message.kind) {
    case Kind::kOptimStep: step(optimizer, decodeOptimStep(message)); break;
    case Kind::kOptimState: return encodeStates(optimizer.state());
    case Kind::kOptimLoad: optimizer.load(decodeOptimLoad(message)); break;
    default: throw Error(ErrorCode::kProtocol, "no request about an optimizer");
  }
  return {.kind = Kind::kReply};
}

/// Its client has made sure that there is such a context: one that has never come here has left no gradients here.
std::optional<OptimService::GradientList> OptimService::gradientsIn(int64_t context) const {
  try {
    return gradients_(context);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInvalidArgument) return std::nullopt;
    throw;
  }
}

void OptimService::step(Optimizer& optimizer, const OptimStep& request) {
  std::unordered_map<const at::TensorImpl*, at::Tensor> found;
  if (const auto gradients = gradientsIn(request.context)) {
    for (const auto& [leaf, gradient] : *gradients) found.emplace(leaf.unsafeGetTensorImpl(), gradient);
  }
  Tensors grads;
  for (const auto& param : optimizer.params()) {
    const auto it = found.find(param.unsafeGetTensorImpl());
    grads.push_back(it == found.end() ? at::Tensor() : it->second);
  }
  if (!request.options.empty()) optimizer.setOptions(request.revision, request.options);
  optimizer.step(grads);
}

}  // namespace torchrpc
