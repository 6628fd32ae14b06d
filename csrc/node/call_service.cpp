#include "node/call_service.h"

#include <thread>

#include "base/exception.h"
#include "calls/thread_record.h"
#include "node/thread_state.h"

namespace torchrpc {

namespace {

/// Sets the function's name for the audit log. The runner of Python functions sets it itself, because the name may be
/// in a pickle.
void nameForAudit(const Request& request) {
  if (!request.audit || traitsOf(request.message.kind).callable == CallableType::kPython) return;
  request.audit->setFunction(functionName(request.message));
}

}  // namespace

void CallService::serve(CallableType type, const std::shared_ptr<CallableRunner>& runner) {
  messenger_.on(
      kindOf(Operation::kCall, type), runner->where(),
      [this, runner](Request&& request, const Responder& responder) { call(*runner, std::move(request), responder); });
  messenger_.on(
      kindOf(Operation::kRemote, type), runner->where(), [this, runner](Request&& request, const Responder& responder) {
        remote(*runner, std::move(request), responder);
      });
}

template <typename Run, typename Fail>
void CallService::prepare(Request&& request, const Run& run, const Fail& fail) {
  nameForAudit(request);
  const auto id = request.id();
  Invocation plain{
      .from = std::move(request.from),
      .message = std::move(request.message),
      .audit = std::move(request.audit),
      .id = id};
  if (!plain.message.header(HeaderKind::kRRefForks))
    return runOrFail([&] { run(std::move(plain)); }, fail, ErrorCode::kUserException);
  const auto invocation = std::make_shared<Invocation>(std::move(plain));
  auto go = [invocation, run, fail](Result<std::vector<RRefPtr>> rrefs) {
    if (!rrefs) return fail(rrefs.error());
    invocation->rrefs = std::move(rrefs).value();
    runOrFail([&] { run(std::move(*invocation)); }, fail, ErrorCode::kUserException);
  };
  // Owners usually have confirmed already: then adopt() calls `ready` before it returns, and this thread runs the call.
  // A later confirmation goes to the pool. It may arrive on this thread, too, in a transport callback that runs while
  // the thread sends, and nothing may block there.
  auto adopted = std::make_shared<std::optional<Result<std::vector<RRefPtr>>>>();
  auto ready = [this, go, in_adopt = std::weak_ptr(adopted), thread = std::this_thread::get_id(), state = ThreadState(),
                served = ThreadRecord::ofThisThread().served()](Result<std::vector<RRefPtr>> rrefs) {
    if (std::this_thread::get_id() == thread) {
      if (const auto result = in_adopt.lock()) return void(result->emplace(std::move(rrefs)));
    }
    messenger_.post([go, state, served, rrefs = std::move(rrefs)] {
      std::optional<ServedScope> record;
      if (served) record.emplace(*served);
      state.run([&] { go(rrefs); });
    });
  };
  runOrFail(
      [&] { rrefs_.adopt(forksIn(invocation->message), /*wait_for_owner=*/true, std::move(ready)); }, fail,
      ErrorCode::kUserException);
  if (*adopted) go(*std::move(*adopted));
}

std::optional<Interceptors::End> CallService::show(Request& request, const Responder& responder) {
  try {
    return interceptors_.serve(request);
  } catch (const Error& refusal) {
    rrefs_.discard(request.message);
    nameForAudit(request);
    if (request.audit) request.audit->setFailure(refusal);
    responder.fail(refusal);
    return std::nullopt;
  }
}

void CallService::call(CallableRunner& runner, Request&& request, const Responder& responder) {
  const auto end = show(request, responder);
  if (!end) return;
  if (!*end) return run(runner, std::move(request), responder);
  run(runner, std::move(request), Responder([end = *end, responder](Result<Message> reply) {
        Interceptors::end(end, reply ? nullptr : &reply.error());
        responder.complete(std::move(reply));
      }));
}

void CallService::run(CallableRunner& runner, Request&& request, const Responder& responder) {
  prepare(
      std::move(request),
      [&runner, responder](Invocation&& invocation) { runner.call(std::move(invocation), responder); },
      [responder](Error error) { responder.fail(std::move(error)); });
}

std::shared_ptr<OwnerRRef> CallService::findEarlier(const Request& request, const std::shared_ptr<OwnerRRef>& rref) {
  const auto* bytes = keyed_ ? request.message.header(HeaderKind::kRepeatable) : nullptr;
  if (!bytes) return nullptr;
  const auto header = RepeatableHeader::decode(*bytes);
  if (header.key.empty()) return nullptr;
  return std::static_pointer_cast<OwnerRRef>(keyed_->beginValue(request, header, rref));
}

void CallService::remote(CallableRunner& runner, Request&& request, const Responder& responder) {
  const auto end = show(request, responder);
  if (!end) return;
  const auto owned = rrefs_.host(request);
  // The reply, which confirms the caller's RRef, is sent when the function has run. So the call's time-out covers the
  // function, as in a plain call.
  owned.rref->whenReady([responder](const auto&) { responder.reply(Message{.kind = Kind::kReply}); });
  if (!owned.created) {
    Interceptors::end(*end, nullptr);
    return rrefs_.discard(request.message);  // the forks that it carries are held by this worker now
  }
  owned.rref->setQuotaToken(std::move(request.rref_quota_token));
  auto settle = [rref = owned.rref, audit = request.audit, end = *end](Result<c10::IValue> result) {
    if (audit && !result) audit->setFailure(result.error());
    Interceptors::end(end, result ? nullptr : &result.error());
    if (result) {
      rref->setValue(std::move(result).value());
    } else {
      rref->setError(result.error());
    }
  };
  try {
    if (const auto earlier = findEarlier(request, owned.rref)) {
      rrefs_.discard(request.message);
      // The value is the same, and lives as long as one of the two RRefs.
      return earlier->whenReady([settle](const Result<c10::IValue>& value) { settle(value); });
    }
  } catch (const Error& error) {
    rrefs_.discard(request.message);
    return settle(error);
  }
  prepare(
      std::move(request),
      [&runner, settle](Invocation&& invocation) { runner.evaluate(std::move(invocation), settle); }, settle);
}

}  // namespace torchrpc
