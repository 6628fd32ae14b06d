#pragma once

// Tensors, values and messages of many kinds for the tests of this folder, and what "arrived the same" means for them.

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

/// One of every kind of tensor that can travel.
std::vector<Sample> sampleTensors();

/// Equal in everything that travels; strides only where `sent` is dense.
bool arrivedSame(const at::Tensor& sent, const at::Tensor& arrived);
bool arrivedSame(const c10::IValue& sent, const c10::IValue& arrived);

/// A frame as it arrives: each segment memory of its own.
Frame transported(Frame frame);

at::Tensor roundTrip(const at::Tensor& tensor);
c10::IValue roundTrip(const c10::IValue& value, const c10::TypePtr& type = nullptr);

c10::IValue randomValue(std::mt19937& random, const std::vector<at::Tensor>& tensors, int depth = 3);
Message randomMessage(std::mt19937& random);

}  // namespace torchrpc
