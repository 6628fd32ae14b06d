#include "rref/rref_node.h"

#include <atomic>

#include "rref/outgoing_forks.h"
#include "wire/codec.h"

namespace torchrpc::testing {

RRefNode::RRefNode(Messenger& messenger, Hooks hooks)
    : messenger_(messenger),
      hooks_(std::move(hooks)),
      service_(RRefService::create(
          messenger,
          {.encode_value = [this](const auto& value, const auto& to) { return encode(value, to); },
           // Counted, so that a seed decides the order in which tables are searched.
           .next_random = [next = std::make_shared<std::atomic<uint64_t>>(0)] { return (*next)++; }})) {
  messenger.on(Kind::kCppCall, Messenger::Where::kLoop, [this](Request request, Responder responder) {
    serveCall(request, responder);
  });
  messenger.on(Kind::kCppRemote, Messenger::Where::kLoop, [this](Request request, Responder responder) {
    serveRemote(request, responder);
  });
}

int64_t RRefNode::numberOf(const c10::IValue& value) {
  return value.isInt() ? value.toInt() : value.toTensor().const_data_ptr<int64_t>()[0];
}

Message RRefNode::encode(const c10::IValue& value, const WorkerInfo& to) {
  Message reply;
  reply.kind = Kind::kReply;
  Writer(reply.payload).put(numberOf(value));
  attach(reply, hooks_.inside_values(*this), to.id);
  return reply;
}

void RRefNode::attach(Message& message, const RRefs& rrefs, WorkerId to) {
  OutgoingForks forks(*service_, to);
  for (const auto& rref : rrefs) forks.add(rref);
  forks.commit(message);
}

RRefPtr RRefNode::remote(WorkerId to, const RRefs& args, Duration timeout) {
  Message call;
  call.kind = Kind::kCppRemote;
  attach(call, args, to);
  return service_->remote(messenger_.worker(to), std::move(call), timeout);
}

void RRefNode::call(WorkerId to, const RRefs& args, CallDone done, bool known) {
  Message message;
  message.kind = Kind::kCppCall;
  attach(message, args, known ? to : kNoWorker);
  messenger_.request(
      to, std::move(message), kNoLimit, [service = service_, done = std::move(done)](Result<Message> reply) {
        if (!reply.ok()) return done(reply.error());
        service->adopt(forksIn(reply.value()), false, done);
      });
}

void RRefNode::fetch(const std::shared_ptr<UserRRef>& rref, std::function<void(Result<int64_t>)> done) {
  service_->fetch(
      rref, Kind::kRRefFetch, kNoLimit, [service = service_, done = std::move(done)](Result<Message> reply) {
        if (!reply.ok()) return done(reply.error());
        done(Reader(reply.value().payload).get<int64_t>());
        service->discard(reply.value());
      });
}

void RRefNode::serveCall(const Request& request, const Responder& responder) {
  service_->adopt(forksIn(request.message), true, [this, from = request.from, responder](Result<RRefs> args) {
    if (!args.ok()) return responder.fail(args.error());
    messenger_.post([this, from, responder, args = std::move(args).value()]() mutable {
      try {
        Message reply;
        reply.kind = Kind::kReply;
        attach(reply, hooks_.function(*this, from, std::move(args)), from.id);
        responder.reply(std::move(reply));
      } catch (const Error& error) {
        responder.fail(error);
      }
    });
  });
}

void RRefNode::serveRemote(const Request& request, const Responder& responder) {
  const auto hosted = service_->host(request);
  const auto reply = [responder] {
    Message message;
    message.kind = Kind::kReply;
    responder.reply(std::move(message));
  };
  service_->adopt(forksIn(request.message), true, [this, hosted, reply](Result<RRefs> args) {
    if (!hosted.created) return reply();
    if (!args.ok()) {
      hosted.rref->setError(args.error());
      return reply();
    }
    messenger_.post([this, rref = hosted.rref, reply, args = std::move(args).value()]() mutable {
      rref->setValue(hooks_.remote_function(*this, rref->id(), std::move(args)));
      reply();
    });
  });
}

}  // namespace torchrpc::testing
