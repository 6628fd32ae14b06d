#pragma once

// The two ends of a graph edge between workers: where a tensor left one local graph (send function) and where it
// entered another (receive function). Gradients travel in the opposite direction.

#include <torch/csrc/autograd/function.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "autograd/ids.h"
#include "autograd/node_ptr.h"

namespace torchrpc {

using torch::autograd::edge_list;
using torch::autograd::variable_list;

/// A message that was sent. Its edges lead to the nodes that computed the tensors of the message. As a node it forwards
/// gradients unchanged. The roots of a pass are below a send function without an id.
class SendFunction final : public torch::autograd::Node {
 public:
  SendFunction(MessageId id, edge_list edges, WorkerId receiver = kNoWorker)
      : Node(std::move(edges)), id_(id), receiver_(receiver) {}

  MessageId id() const { return id_; }
  /// The worker to which the message was sent. Only this worker sends gradients for it.
  WorkerId receiver() const { return receiver_; }
  std::string name() const override {
    return id_ == kNoAutogradId ? "torchrpc::GraphRoot" : "torch::distributed::autograd::SendRpcBackward";
  }

 protected:
  variable_list apply(variable_list&& gradients) override { return std::move(gradients); }

 private:
  const MessageId id_;
  const WorkerId receiver_;
};

/// The grad_fn of the tensors that were received in one message, with one input for each. Gradients that reach it are
/// sent to the sender of that message.
class RecvFunction final : public torch::autograd::Node {
 public:
  using Deliver = std::function<void(const RecvFunction&, variable_list gradients)>;

  /// `dependencies`: the messages to `sender` from which `sender` computed these tensors, if it has declared them.
  /// `sources`: the devices of the sender to which gradients go, by input; empty, or nullopt: the device that the
  /// gradients have here.
  RecvFunction(
      MessageId id, WorkerId sender, std::optional<std::vector<MessageId>> dependencies,
      std::vector<std::optional<c10::Device>> sources = {})
      : id_(id), sender_(sender), dependencies_(std::move(dependencies)), sources_(std::move(sources)) {}

  MessageId id() const { return id_; }
  WorkerId sender() const { return sender_; }
  const std::optional<std::vector<MessageId>>& dependencies() const { return dependencies_; }
  const std::vector<std::optional<c10::Device>>& sources() const { return sources_; }
  std::string name() const override { return "torch::distributed::autograd::RecvRpcBackward"; }

  /// While it lives, this thread runs `function` for a distributed backward pass, and its gradients go to `deliver`.
  /// Outside of such a scope it is an error to run a receive function: torch's own engine cannot send gradients.
  class DeliveryScope {
   public:
    DeliveryScope(const RecvFunction& function, const Deliver& deliver);
    ~DeliveryScope();
    DeliveryScope(const DeliveryScope&) = delete;
    DeliveryScope& operator=(const DeliveryScope&) = delete;

   private:
    const DeliveryScope* const outer_;
    const RecvFunction& function_;
    const Deliver& deliver_;
    friend class RecvFunction;
  };

 protected:
  variable_list apply(variable_list&& gradients) override;

 private:
  const MessageId id_;
  const WorkerId sender_;
  const std::optional<std::vector<MessageId>> dependencies_;
  const std::vector<std::optional<c10::Device>> sources_;
};

/// Returns the ids of the receive functions that can be reached from these edges; nullopt if the graph is too large to
/// search while a caller waits for the reply.
std::optional<std::vector<MessageId>> dependenciesOf(const edge_list& edges);

}  // namespace torchrpc
