#include "optim/optim_service.h"

#include <unordered_map>

#include "base/exception.h"
#include "optim/result_collector.h"

namespace torchrpc {

namespace {

/// Runs `body`. Replies with an exception that `body` throws, as an error of the worker `self`.
template <typename Body>
void failOnException(const Responder& responder, const WorkerInfo& self, Body&& body) {
  runOrFail(
      std::forward<Body>(body), [&responder](Error error) { responder.fail(std::move(error)); },
      ErrorCode::kUserException, self.name);
}

/// Calls `done` once when all these RRefs, which this node owns, are ready: with their values, or with the first error.
void whenAllReady(
    const std::vector<RRefPtr>& rrefs, const std::function<void(Result<std::vector<c10::IValue>>)>& done) {
  if (rrefs.empty()) return done(std::vector<c10::IValue>());
  const auto collector =
      std::make_shared<ResultCollector<c10::IValue>>(rrefs.size(), [done](std::vector<Result<c10::IValue>> results) {
        std::vector<c10::IValue> values;
        for (auto& result : results) {
          if (!result) return done(result.error());
          values.push_back(std::move(result).value());
        }
        done(std::move(values));
      });
  for (size_t i = 0; i < rrefs.size(); ++i) {
    std::static_pointer_cast<OwnerRRef>(rrefs[i])->whenReady(
        [collector, i](const Result<c10::IValue>& value) { collector->set(i, value); });
  }
}

/// Returns the tensor of a parameter; converts a Python object. Throws Error(kInvalidArgument) for other values.
at::Tensor tensorIn(const c10::IValue& value, size_t param, const WorkerInfo& self) {
  auto tensor = value;
  if (value.isPyObject()) {
    try {
      tensor = value.toPyObjectHolder()->toIValue(c10::TensorType::get());
    } catch (const std::exception&) {  // not a tensor
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
      failOnException(responder, messenger_.self(), [&] { (this->*handler)(request, responder); });
    });
  };
  serve(Kind::kOptimCreate, &OptimService::serveCreate);
  for (const auto kind : {Kind::kOptimStep, Kind::kOptimState, Kind::kOptimLoad}) {
    serve(kind, &OptimService::serveRequest);
  }
}

// --- the client's side ---

void OptimService::create(
    const WorkerInfo& owner, const OptimCreate& request, const std::vector<RRefPtr>& params, Duration timeout,
    Created done) {
  auto message = encode(request);
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
          rrefs_.abandon(forks);  // even if the owner has received them: forks to the owner need no protection
          return done(reply.error());
        }
        const Error malformed(ErrorCode::kProtocol, "malformed message: an optimizer without its RRef");
        try {
          rrefs_.adopt(
              forksIn(reply.value()), /*wait_for_owner=*/false, [done, malformed](Result<std::vector<RRefPtr>> rrefs) {
                if (!rrefs) return done(rrefs.error());
                if (rrefs.value().size() != 1) return done(malformed);
                done(rrefs.value().front());
              });
        } catch (const Error& error) {
          done(error);
        }
      });
}

void OptimService::request(
    const RRefPtr& optimizer, Message&& message, Duration timeout, Messenger::ReplyHandler&& done) {
  if (auto owner = std::dynamic_pointer_cast<OwnerRRef>(optimizer)) {
    // This node owns the optimizer, so no message is sent. The responder passes exceptions to `done` as well.
    messenger_.post([this, owner, message = std::move(message), responder = Responder(std::move(done))] {
      failOnException(responder, messenger_.self(), [&] {
        const auto value = owner->wait(kNoLimit);
        responder.reply(execute(optimizerIn(value, messenger_.self()), message));
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
  const auto forks = forksIn(request.message);
  auto create = [this, request, responder](std::vector<c10::IValue> params) {
    messenger_.post([this, request, responder, params = std::move(params)] {
      failOnException(responder, messenger_.self(), [&] {
        createHere(request.from, decodeOptimCreate(request.message), params, responder);
      });
    });
  };
  rrefs_.adopt(
      forks, /*wait_for_owner=*/true,
      [this, responder, create = std::move(create)](const Result<std::vector<RRefPtr>>& params) {
        if (!params) return responder.fail(params.error());
        for (const auto& param : params.value()) {
          if (param->isOwner()) continue;
          return responder.fail(Error(
              ErrorCode::kInvalidArgument,
              messenger_.self().name + " cannot step a parameter that " + param->owner().name + " owns"));
        }
        whenAllReady(params.value(), [responder, create](Result<std::vector<c10::IValue>> values) {
          values ? create(std::move(values).value()) : responder.fail(values.error());
        });
      });
}

void OptimService::createHere(
    const WorkerInfo& creator, const OptimCreate& request, const std::vector<c10::IValue>& params,
    const Responder& responder) {
  std::vector<Optimizer::Group> groups;
  size_t next = 0;
  for (const auto& group : request.groups) {
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
  const auto step_mutex = request.lock_free ? nullptr : step_mutex_;
  const auto rref = rrefs_.createOwner();
  rref->setValue(
      c10::IValue::make_capsule(c10::make_intrusive<Optimizer>(request.kind, std::move(groups), step_mutex)));
  Message reply{.kind = Kind::kReply};
  reply.headers.push_back({HeaderKind::kRRefForks, encodeForks({rrefs_.fork(rref, creator.id)})});
  responder.reply(std::move(reply));
}

void OptimService::serveRequest(const Request& request, const Responder& responder) {
  const auto rref = rrefs_.findNamed(request, decodeOptimTarget(request.message)).take();
  const auto value = rref->wait(Duration(1));  // does not block: an optimizer's RRef is created with its value
  responder.reply(execute(optimizerIn(value, messenger_.self()), request.message));
}

Message OptimService::execute(Optimizer& optimizer, const Message& request) {
  switch (request.kind) {
    case Kind::kOptimStep: step(optimizer, decodeOptimStep(request)); break;
    case Kind::kOptimState: return encodeStates(optimizer.state());
    case Kind::kOptimLoad: optimizer.load(decodeOptimLoad(request)); break;
    default: throw Error(ErrorCode::kProtocol, "not a request about an optimizer");
  }
  return {.kind = Kind::kReply};
}

/// The client has checked that the context exists. If it has never reached this node, it has left no gradients here.
OptimService::GradientList OptimService::gradientsIn(int64_t context) const {
  try {
    return gradients_(context);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInvalidArgument) return {};
    throw;
  }
}

void OptimService::step(Optimizer& optimizer, const OptimStep& request) {
  std::unordered_map<const at::TensorImpl*, at::Tensor> found;
  for (const auto& [leaf, gradient] : gradientsIn(request.context)) {
    found.emplace(leaf.unsafeGetTensorImpl(), gradient);
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
