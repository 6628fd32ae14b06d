#pragma once

// TLS certificates for tests, made by the program openssl.

#include <cstdlib>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <unistd.h>

#include "transport/tls_files.h"

namespace torchrpc::test {

/// A certificate that signs itself, as an authority does, for the name; made once a process.
/// @param units organizational units, each as "/OU=unit"
/// @param uris more names, each as ",URI:uri"
inline const TlsFiles& certificateOf(
    const std::string& name, const std::string& units = "", const std::string& uris = "") {
  struct Folder {
    const std::filesystem::path path =
        std::filesystem::temp_directory_path() / ("torchrpc-certificates-" + std::to_string(::getpid()));
    ~Folder() { std::filesystem::remove_all(path); }
  };
  static const Folder folder;
  static std::map<std::string, TlsFiles> made;
  auto& files = made[name + units + uris];
  if (files.isGiven()) return files;
  std::filesystem::create_directories(folder.path);
  const auto file = name + std::to_string(made.size());
  files.certificate = files.authorities = folder.path / (file + ".pem");
  files.key = folder.path / (file + ".key");
  const auto command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=test" +
      units + " -addext subjectAltName=DNS:" + name + uris + " -keyout " + files.key + " -out " + files.certificate +
      " 2> /dev/null";
  if (std::system(command.c_str()) != 0) throw std::runtime_error("tests of TLS need the program openssl: " + command);
  return files;
}

}  // namespace torchrpc::test
