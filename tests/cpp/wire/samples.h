#pragma once

// Sample tensors, values and messages for the tests of this folder, and comparisons of what was sent with what arrived.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <random>
#include <string>
#include <vector>

#include "wire/message.h"
#include "wire/tensor_codec.h"

namespace torchrpc {

struct Sample {
  std::string name;
  at::Tensor tensor;
};

/// A tensor of every kind that can be sent.
std::vector<Sample> sampleTensors();

/// Whether all properties that are sent are equal. Strides are compared only if `sent` is dense.
bool arrivedSame(const at::Tensor& sent, const at::Tensor& arrived);
bool arrivedSame(const c10::IValue& sent, const c10::IValue& arrived);

/// The frame as it arrives: each segment in memory of its own.
Frame transported(Frame frame);

at::Tensor roundTrip(const at::Tensor& tensor);
c10::IValue roundTrip(const c10::IValue& value, const c10::TypePtr& type = nullptr);

c10::IValue randomValue(std::mt19937& random, const std::vector<at::Tensor>& tensors, int depth = 3);
Message randomMessage(std::mt19937& random);

}  // namespace torchrpc
