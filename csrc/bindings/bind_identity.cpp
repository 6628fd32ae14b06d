// Group keys and identities, for `torchrpc keygen`.

#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "transport/native/auth/identity.h"

namespace torchrpc::bindings {

void bindIdentities(py::module_& module) {
  module.def("_make_group_key", &native::makeGroupKey, "The text of a new group key file.");
  module.def(
      "_make_identity",
      [](const std::string& group_key, std::string name, std::vector<std::string> roles, int64_t seconds) {
        return native::makeIdentity(
            group_key, {.name = std::move(name), .roles = std::move(roles)}, std::chrono::seconds(seconds));
      },
      py::arg("group_key"), py::arg("name"), py::arg("roles"), py::arg("seconds"),
      "The text of a new identity file, made with the text of a group key file.");
}

}  // namespace torchrpc::bindings
