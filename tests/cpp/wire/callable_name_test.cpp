#include "wire/callable_name.h"

#include <catch2/catch.hpp>

#include <string>

#include "wire/codec.h"

namespace torchrpc {

namespace {

std::string pythonPayload(uint8_t form, std::string_view module, std::string_view qualname) {
  std::string out;
  Writer writer(out);
  writer.put(form);
  writer.put(uint8_t{0});
  writer.putString(module);
  writer.putString(qualname);
  out += "the rest";
  return out;
}

}  // namespace

TEST_CASE("names of callables are read from payloads of calls") {
  for (const uint8_t form : {0, 1, 2}) {
    CHECK(callableName(Kind::kPythonCall, pythonPayload(form, "train", "Model.step")) == "train.Model.step");
  }
  CHECK(callableName(Kind::kPythonRemote, pythonPayload(1, "", "a function")) == "a function");
  std::string op;
  Writer writer(op);
  writer.putString("aten::add");
  writer.putString("Tensor");
  CHECK(callableName(Kind::kBuiltinCall, op) == "aten::add");
  CHECK(callableName(Kind::kCppRemote, op) == "aten::add");
  CHECK(callableName(Kind::kRRefFetch, op).empty());
  CHECK(callableName(Kind::kReply, op).empty());
}

TEST_CASE("a payload that ends within a name gives what there is of it") {
  const auto whole = pythonPayload(0, "module_of_train", "Model.step");
  const auto names = whole.size() - std::string("the rest").size();
  for (size_t size = 0; size <= names; ++size) {
    const auto name = callableName(Kind::kPythonCall, std::string_view(whole).substr(0, size));
    CAPTURE(size, name);
    if (size == names) {
      CHECK(name == "module_of_train.Model.step");
    } else {
      CHECK((name.empty() || name.ends_with("...") || name == "module_of_train"));
    }
  }
  CHECK(callableName(Kind::kPythonCall, std::string_view(whole).substr(0, 16)) == "module...");
  CHECK(callableName(Kind::kPythonCall, std::string(200, '\xff')).ends_with("..."));
}

TEST_CASE("the first bytes of a payload determine the name, whatever the arguments are") {
  const auto of = [](const std::string& payload) { return std::string(callableNameBytes(Kind::kPythonCall, payload)); };
  const auto step = pythonPayload(0, "train", "Model.step");
  CHECK(callableName(Kind::kPythonCall, of(step)) == "train.Model.step");
  CHECK(of(step) == of(step + " of other arguments"));
  CHECK(of(step) != of(pythonPayload(0, "train", "Model.stop")));
  CHECK(of(pythonPayload(0, std::string(kCallableNameBytes, 'm'), "step")).size() == kCallableNameBytes);
  CHECK(callableNameBytes(Kind::kReply, step).empty());
}

TEST_CASE("a name that a peer has made up cannot steer a terminal") {
  CHECK(callableName(Kind::kPythonCall, pythonPayload(0, "a\x1b[2J", "b\n\x7f")) == "a?[2J.b??");
}

}  // namespace torchrpc
