#include "bindings/py_calls.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include <algorithm>

#include "base/name_pattern.h"
#include "bindings/current_node.h"
#include "bindings/py_codec.h"
#include "bindings/py_errors.h"
#include "bindings/py_future.h"
#include "bindings/py_gil.h"
#include "bindings/py_names.h"
#include "bindings/py_object_tags.h"

namespace torchrpc::bindings {

namespace {

// The first characters of the lines of metadataOf().
constexpr char kLimited = '+';
constexpr char kUnlimited = '-';

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

py::object unpickle(std::string_view bytes, const std::vector<at::Tensor>& tensors) {
  py::list table;
  for (const auto& tensor : tensors) table.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)));
  // A view without a copy: `bytes` outlives the call.
  const auto view = py::memoryview::from_memory(bytes.data(), static_cast<Py_ssize_t>(bytes.size()));
  return internalFunction("deserialize")(view, table);
}

/// Whether a worker that has published `metadata`, which metadataOf() has made, has an allow-list for that caller.
bool limitsCaller(std::string_view metadata, const std::string& caller) {
  const bool has_lists = metadata.starts_with(kLimited) || metadata.starts_with(kUnlimited);
  while (has_lists && !metadata.empty()) {
    const auto line = metadata.substr(0, metadata.find('\n'));
    if (matchesPattern(caller, std::string(line.substr(1)))) return line.front() == kLimited;
    metadata.remove_prefix(std::min(line.size() + 1, metadata.size()));
  }
  return has_lists;
}

/// Whether `node` reads pickles of a worker of that name.
bool readsPickles(const Node& node, const std::string& from) { return node.usesPickles() && !node.allowed().of(from); }

/// Whether the node sends `to` values with objects, and no pickles.
bool sendsObjects(Node& node, const WorkerInfo& to) {
  const auto& self = node.self();
  if (!node.usesPickles() || to.id == self.id) return !readsPickles(node, self.name);
  const auto record = node.agent().directory().find(to.id);
  return record && limitsCaller(record->metadata, self.name);
}

[[noreturn]] void refusePickle(const Node& node, const WorkerInfo& from) {
  const auto& self = node.self().name;
  const auto why = node.usesPickles() ? " from " + from.name + ", because it was started with allowed_functions"
                                      : ", because it was started with pickle=\"off\"";
  const auto remedy = node.usesPickles() ? "send it with the same version of torchrpc, and with its own pickler"
                                         : "start all workers of the group with it";
  throw Error(ErrorCode::kNotAllowed, self + " reads no pickles" + why + ", but it was sent one: " + remedy, self);
}

/// Values with objects are made without the checks of their __setstate__.
[[noreturn]] void refuseObjects(const Node& node) {
  throw Error(
      ErrorCode::kNotAllowed,
      node.self().name +
          " reads pickles, but was sent an object in the form of pickle=\"off\": start all workers of the group with "
          "it, or none",
      node.self().name);
}

/// What lower_object() needs to know of the classes that may be sent: None, all of them, since the receiver decides; or
/// a tuple with this worker's allow-list.
py::object classesFor(const Node& node, const WorkerInfo& to) {
  return node.usesPickles() ? py::none() : py::object(py::make_tuple(allowListFor(node, to.name)));
}

/// Writes the plain form of a call. Returns false if the call has none; the caller must then discard what has been
/// written.
bool encodePlainCall(
    Message& message, OutgoingRRefs& rrefs, const py::object& function, const py::tuple& args, const py::dict& kwargs) {
  const auto name = nameOf(function);
  if (!name) return false;
  Writer writer(message.payload);
  writer.putString(view(name->module));
  writer.putString(view(name->qualname));
  return encodePlain({args, kwargs}, writer, message.tensors, rrefs);
}

/// Whether it is a tuple of a tuple and a dict whose keys are texts.
bool isCall(const py::object& values) {
  auto* const both = values.ptr();
  if (!PyTuple_CheckExact(both) || PyTuple_GET_SIZE(both) != 2) return false;
  auto* const kwargs = PyTuple_GET_ITEM(both, 1);
  if (!PyTuple_CheckExact(PyTuple_GET_ITEM(both, 0)) || !PyDict_CheckExact(kwargs)) return false;
  const auto names = py::reinterpret_borrow<py::dict>(kwargs);
  return std::all_of(
      names.begin(), names.end(), [](const auto& item) { return PyUnicode_CheckExact(item.first.ptr()); });
}

}  // namespace

std::string metadataOf(const std::vector<Allowance>& allowances) {
  std::string metadata;
  for (const auto& [callers, functions] : allowances) {
    metadata += (functions ? kLimited : kUnlimited) + callers + '\n';
  }
  return metadata;
}

Outgoing encodePythonCall(
    Node& node, Kind kind, const WorkerInfo& to, const py::object& function, const py::tuple& args,
    const py::dict& kwargs, bool async_execution) {
  Outgoing out{.message = {.kind = kind}};
  constexpr size_t kMostCallsBytes = 256;
  out.message.payload.reserve(kMostCallsBytes);
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
  if (sendsObjects(node, to)) {
    const auto name = nameOf(function);
    if (!name) internalFunction("refuse_function")(function, to.name);
    writer.put(ValueFormat::kObjects);
    writer.put(async_execution);
    writer.putString(view(name->module));
    writer.putString(view(name->qualname));
    OutgoingRRefs rrefs(node, to.id);
    encodeObjects(
        py::make_tuple(args, kwargs), writer, out.message.tensors, &rrefs, classesFor(node, to),
        py::make_tuple(function, to.name));
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
  const auto pickler = attributeOf(importedOnce("torchrpc.rpc.api"), "_default_pickler");
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
    if (encodePlain({args[i]}, writer, out.message.tensors, rrefs)) continue;
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
  const auto allowed = allowListFor(*node, invocation.from.name, invocation.from.is_member);
  if (invocation.audit && !allowed.is_none()) py::cast<WorkerAllowList&>(allowed).audit = invocation.audit;
  PythonCall call;
  call.async_execution = reader.get<uint8_t>() != 0;
  if (format == ValueFormat::kPlain || format == ValueFormat::kObjects) {
    if (format == ValueFormat::kObjects && readsPickles(*node, invocation.from.name)) refuseObjects(*node);
    const auto module = reader.getString();
    const auto qualname = reader.getString();
    call.function = allowed.is_none()
        ? findCallable(module, qualname)
        : internalFunction("find_allowed")(
              py::str(module.data(), module.size()), py::str(qualname.data(), qualname.size()), allowed);
    if (format == ValueFormat::kObjects) {
      const auto values = decodeObjects(reader, tensors, rrefs, allowed);
      if (!isCall(values)) throw Error(ErrorCode::kProtocol, "malformed message: a call without arguments");
      call.args = py::reinterpret_borrow<py::tuple>(PyTuple_GET_ITEM(values.ptr(), 0));
      call.kwargs = py::reinterpret_borrow<py::dict>(PyTuple_GET_ITEM(values.ptr(), 1));
    } else {
      call.args = py::cast<py::tuple>(decodePlain(reader, tensors, rrefs));
      call.kwargs = py::cast<py::dict>(decodePlain(reader, tensors, rrefs));
    }
    reader.expectEnd();
    return call;
  }
  if (!readsPickles(*node, invocation.from.name)) refusePickle(*node, invocation.from);
  reader.getString();  // the names
  reader.getString();
  const auto udf = unpickle(reader.getBytes(reader.remaining()), tensors);
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
    if (encodePlain({value}, writer, reply.tensors, rrefs)) {
      rrefs.commit(reply);
      return reply;
    }
  }
  reply.payload.clear();
  reply.tensors.clear();
  if (sendsObjects(node, to)) {
    writer.put(ValueFormat::kObjects);
    OutgoingRRefs rrefs(node, to.id);
    encodeObjects(value, writer, reply.tensors, &rrefs, classesFor(node, to), py::none());
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
  const bool reads_pickles = readsPickles(*node, from.name);
  if (format == ValueFormat::kPickle) {
    if (!reads_pickles) refusePickle(*node, from);
    try {
      return unpickle(reader.getBytes(reader.remaining()), reply.tensors);
    } catch (py::error_already_set& raised) {
      addNote(raised, "raised while " + node->self().name + " read the result of a call to " + from.name);
      throw;
    }
  }
  const bool has_objects = format == ValueFormat::kObjects;
  if (has_objects && reads_pickles) refuseObjects(*node);
  auto value = has_objects ? decodeObjects(reader, reply.tensors, rrefs, allowListFor(*node, from.name))
                           : decodePlain(reader, reply.tensors, rrefs);
  reader.expectEnd();
  return value;
}

}  // namespace torchrpc::bindings
