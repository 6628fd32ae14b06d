#pragma once

// The two ends of an edge between workers: where a tensor left one local autograd graph (send function) and where it
// came into another (receive function). Gradients travel the other way.

#include <torch/csrc/autograd/function.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "autograd/ids.h"

namespace torchrpc {

using torch::autograd::edge_list;
using torch::autograd::variable_list;
using NodePtr = c10::intrusive_ptr<torch::autograd::Node>;

/// Its edges lead to what made the tensors that were sent; as a node it passes gradients on. The roots of a pass get
/// one, too, without an id.
class SendFunction final : public torch::autograd::Node {
 public:
  SendFunction(MessageId id, edge_list edges) : Node(std::move(edges)), id_(id) {}

  MessageId id() const { return id_; }
  std::string name() const override {
    return id_ == kNoAutogradId ? "torchrpc::GraphRoot" : "torch::distributed::autograd::SendRpcBackward";
  }

 protected:
  variable_list apply(variable_list&& gradients) override { return std::move(gradients); }

 private:
  const MessageId id_;
};

/// The history of the tensors that came in one message: one input each. Its gradients go to the worker that sent it.
class RecvFunction final : public torch::autograd::Node {
 public:
  using Deliver = std::function<void(const RecvFunction&, variable_list gradients)>;

  /// `dependencies`: the messages to `sender` that what it sent was computed from there, if it has told.
  RecvFunction(MessageId id, WorkerId sender, std::optional<std::vector<MessageId>> dependencies)
      : id_(id), sender_(sender), dependencies_(std::move(dependencies)) {}

  MessageId id() const { return id_; }
  WorkerId sender() const { return sender_; }
  const std::optional<std::vector<MessageId>>& dependencies() const { return dependencies_; }
  std::string name() const override { return "torch::distributed::autograd::RecvRpcBackward"; }

  /// While one lives, this thread runs `function` for a distributed backward pass, and what arrives at it goes to
  /// `deliver`. Outside of that running a receive function is an error: torch's own engine does not know the way.
  class Delivery {
   public:
    Delivery(const RecvFunction& function, const Deliver& deliver);
    ~Delivery();
    Delivery(const Delivery&) = delete;
    Delivery& operator=(const Delivery&) = delete;

   private:
    const Delivery* const outer_;
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
};

/// The receive functions that the local graph reaches from these edges, by number; nullopt if the graph is too large to
/// look through while somebody waits for a message.
std::optional<std::vector<MessageId>> dependenciesOf(const edge_list& edges);

}  // namespace torchrpc
