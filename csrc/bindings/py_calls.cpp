#include "bindings/py_calls.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include "bindings/current_node.h"
#include "bindings/py_codec.h"
#include "bindings/py_errors.h"
#include "bindings/py_future.h"
#include "bindings/py_gil.h"

namespace torchrpc::bindings {

namespace {

/// Appends the pickle of `object` to the payload, and its tensors and buffers to the tensors.
void appendPickle(Message& message, py::handle serialize, const py::object& object) {
  const py::tuple pickled = serialize(object);
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(py::object(pickled[0]).ptr(), &data, &size) != 0) throw py::error_already_set();
  message.payload.append(data, static_cast<size_t>(size));
  for (const auto tensor : py::cast<py::sequence>(pickled[1])) {
    message.tensors.push_back(THPVariable_Unpack(tensor.ptr()));
  }
}

/// `read_allowed`: the function of torchrpc.rpc.internal that reads the pickle if there is an allow-list.
py::object unpickle(
    const py::object& allowed, std::string_view bytes, const std::vector<at::Tensor>& tensors,
    const char* read_allowed) {
  py::list table;
  for (const auto& tensor : tensors) table.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)));
  // A view without a copy: `bytes` outlives the call.
  const auto view = py::memoryview::from_memory(bytes.data(), static_cast<Py_ssize_t>(bytes.size()));
  if (!allowed.is_none()) return internalFunction(read_allowed)(view, table, allowed);
  return internalFunction("deserialize")(view, table);
}

[[noreturn]] void refusePickle(const Node& node) {
  throw Error(
      ErrorCode::kNotAllowed,
      node.self().name +
          " reads no pickles, because it was started with pickle=\"off\", but it was sent one: start all "
          "workers of the group with it",
      node.self().name);
}

/// Appends the plain data that torchrpc.rpc._plain_objects has made of a value. The data has no shared parts.
void appendObjects(Message& message, Writer& writer, OutgoingRRefs& rrefs, const py::object& lowered) {
  if (encodePlain(lowered, writer, message.tensors, rrefs, /*is_tree=*/true)) return;
  throw Error(
      ErrorCode::kSerialization, "a value is nested too deeply, or has texts that are no UTF-8: it cannot be sent");
}

/// Writes the plain form of a call. Returns false if the call has none; the caller must then discard what has been
/// written.
bool encodePlainCall(
    Message& message, OutgoingRRefs& rrefs, const py::object& function, const py::tuple& args, const py::dict& kwargs) {
  const auto name = nameOf(function);
  if (!name) return false;
  Writer writer(message.payload);
  writer.putString(name->module);
  writer.putString(name->qualname);
  return encodePlain(args, writer, message.tensors, rrefs) && encodePlain(kwargs, writer, message.tensors, rrefs);
}

}  // namespace

py::handle moduleAttribute() {
  static auto* const name = PyUnicode_InternFromString("__module__");
  return name;
}

py::handle qualnameAttribute() {
  static auto* const name = PyUnicode_InternFromString("__qualname__");
  return name;
}

std::string textAttribute(const py::object& object, const py::handle& name) {
  PyObject* found = nullptr;
  if (PyObject_GetOptionalAttr(object.ptr(), name.ptr(), &found) < 0) PyErr_Clear();
  const auto text = py::reinterpret_steal<py::object>(found);
  Py_ssize_t size = 0;
  const char* utf8 = text && PyUnicode_Check(text.ptr()) ? PyUnicode_AsUTF8AndSize(text.ptr(), &size) : nullptr;
  if (utf8) return {utf8, static_cast<size_t>(size)};
  PyErr_Clear();
  return {};
}

Outgoing encodePythonCall(
    Node& node, Kind kind, const WorkerInfo& to, const py::object& function, const py::tuple& args,
    const py::dict& kwargs, bool async_execution) {
  Outgoing out{.message = {.kind = kind}};
  Writer writer(out.message.payload);
  writer.put(ValueFormat::kPlain);
  writer.put(async_execution);
  {
    OutgoingRRefs rrefs(node, to.id);
    if (encodePlainCall(out.message, rrefs, function, args, kwargs)) {
      out.forks = rrefs.commit(out.message);
      return out;
    }
  }
  out.message.payload.clear();
  out.message.tensors.clear();
  if (!node.usesPickles()) {
    const auto lowered = internalFunction("lower_call")(to.name, function, args, kwargs);
    const auto name = nameOf(function);
    if (!name) throw Error(ErrorCode::kSerialization, "a function without a name cannot be sent");
    writer.put(ValueFormat::kObjects);
    writer.put(async_execution);
    writer.putString(name->module);
    writer.putString(name->qualname);
    OutgoingRRefs rrefs(node, to.id);
    appendObjects(out.message, writer, rrefs, lowered);
    out.forks = rrefs.commit(out.message);
    return out;
  }
  writer.put(ValueFormat::kPickle);
  writer.put(async_execution);
  // Only for metrics and tools that show calls. The callee reads the function from the pickle.
  writer.putString(textAttribute(function, moduleAttribute()));
  writer.putString(textAttribute(function, qualnameAttribute()));
  OutgoingRRefs rrefs(node, to.id);
  // Looked up for each call, because users may replace it temporarily.
  const auto pickler = py::module_::import("torchrpc.rpc.api").attr("_default_pickler");
  appendPickle(out.message, pickler.attr("serialize"), internalFunction("PythonUDF")(function, args, kwargs));
  out.forks = rrefs.commit(out.message);
  return out;
}

Outgoing encodeCppCall(Node& node, Kind kind, const WorkerInfo& to, const std::string& name, const py::tuple& args) {
  Outgoing out{.message = {.kind = kind}};
  Writer writer(out.message.payload);
  writer.putString(name);
  writer.put(static_cast<uint32_t>(args.size()));
  OutgoingRRefs rrefs(node, to.id);
  for (size_t i = 0; i < args.size(); ++i) {
    if (encodePlain(args[i], writer, out.message.tensors, rrefs)) continue;
    const auto type = py::cast<std::string>(py::type::of(args[i]).attr("__qualname__"));
    throw Error(
        ErrorCode::kSerialization,
        "argument " + std::to_string(i) + " of the C++ function " + name + ", a " + type +
            ", cannot be sent: C++ takes None, bool, int, float, complex, str, bytes, torch.Tensor, dtype, device, "
            "RRef, dataclasses of torchrpc.cpp_struct, and lists, tuples and dicts of those");
  }
  out.forks = rrefs.commit(out.message);
  return out;
}

PythonCall decodePythonCall(const std::shared_ptr<Node>& node, Invocation& invocation) {
  const IncomingRRefs rrefs(node, invocation.rrefs);
  const auto tensors = std::move(invocation.message.tensors);
  Reader reader(invocation.message.payload);
  const auto format = reader.get<ValueFormat>();
  const auto allowed = allowListFor(*node, invocation.from.name, invocation.is_from_member);
  PythonCall call;
  call.async_execution = reader.get<uint8_t>() != 0;
  if (format == ValueFormat::kPlain || format == ValueFormat::kObjects) {
    const auto module = reader.getString();
    const auto qualname = reader.getString();
    call.function = allowed.is_none()
        ? findCallable(module, qualname)
        : internalFunction("find_allowed")(
              py::str(module.data(), module.size()), py::str(qualname.data(), qualname.size()), allowed);
    if (format == ValueFormat::kObjects) {
      const py::tuple values = internalFunction("restore_call")(decodePlain(reader, tensors, rrefs), allowed);
      call.args = py::cast<py::tuple>(values[0]);
      call.kwargs = py::cast<py::dict>(values[1]);
    } else {
      call.args = py::cast<py::tuple>(decodePlain(reader, tensors, rrefs));
      call.kwargs = py::cast<py::dict>(decodePlain(reader, tensors, rrefs));
    }
    reader.expectEnd();
    return call;
  }
  if (!node->usesPickles()) refusePickle(*node);
  reader.getString();  // the names
  reader.getString();
  const auto udf = unpickle(allowed, reader.getBytes(reader.remaining()), tensors, "deserialize_allowed_call");
  call.function = udf.attr("func");
  call.args = py::tuple(udf.attr("args"));
  call.kwargs = py::dict(udf.attr("kwargs"));
  return call;
}

Message encodeResult(Node& node, const WorkerInfo& to, const py::object& value) {
  Message reply{.kind = Kind::kReply};
  Writer writer(reply.payload);
  writer.put(ValueFormat::kPlain);
  {
    OutgoingRRefs rrefs(node, to.id);
    if (encodePlain(value, writer, reply.tensors, rrefs)) {
      rrefs.commit(reply);
      return reply;
    }
  }
  reply.payload.clear();
  reply.tensors.clear();
  if (!node.usesPickles()) {
    const auto lowered = internalFunction("lower_result")(value);
    writer.put(ValueFormat::kObjects);
    OutgoingRRefs rrefs(node, to.id);
    appendObjects(reply, writer, rrefs, lowered);
    rrefs.commit(reply);
    return reply;
  }
  writer.put(ValueFormat::kPickle);
  OutgoingRRefs rrefs(node, to.id);
  appendPickle(reply, internalFunction("serialize"), value);
  rrefs.commit(reply);
  return reply;
}

Message encodeResult(Node& node, const WorkerInfo& to, const c10::IValue& value) {
  if (!value.isPyObject()) {
    try {
      return plainReply(value);
    } catch (const Error& e) {
      if (e.code() != ErrorCode::kSerialization || value.isCapsule()) throw;
    }
  }
  const AcquireGil gil;
  try {
    return encodeResult(node, to, toObject(value));
  } catch (py::error_already_set& e) {
    throw toError(e, node.self());
  } catch (const std::runtime_error& e) {  // a value without a Python form
    throw Error(ErrorCode::kSerialization, e.what(), node.self().name);
  }
}

py::object decodeResult(
    const std::shared_ptr<Node>& node, const WorkerInfo& from, Message reply, const std::vector<RRefPtr>& received) {
  const IncomingRRefs rrefs(node, received);
  Reader reader(reply.payload);
  if (reader.remaining() == 0) return py::none();
  const auto format = reader.get<ValueFormat>();
  if (format == ValueFormat::kPickle) {
    if (!node->usesPickles()) refusePickle(*node);
    return unpickle(
        allowListFor(*node, from.name), reader.getBytes(reader.remaining()), reply.tensors, "deserialize_allowed");
  }
  auto value = decodePlain(reader, reply.tensors, rrefs);
  reader.expectEnd();
  if (format == ValueFormat::kObjects) return internalFunction("restore_result")(value, allowListFor(*node, from.name));
  return value;
}

}  // namespace torchrpc::bindings
