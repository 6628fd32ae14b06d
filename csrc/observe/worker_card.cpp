#include "observe/worker_card.h"

#include "base/os/memory.h"

namespace torchrpc {

WorkerCard::WorkerCard(const std::vector<std::pair<std::string, std::string>>& fields) {
  std::string text;
  for (const auto& [name, value] : fields) text += name + " " + value + "\n";
  file_ = native::Descriptor(os::openSealedFile(kFileName, text));
}

std::string WorkerCard::hex(const std::string& bytes) {
  constexpr auto kDigits = "0123456789abcdef";
  std::string out;
  for (const auto byte : bytes) {
    const auto number = static_cast<unsigned char>(byte);
    out += kDigits[number / 16];
    out += kDigits[number % 16];
  }
  return out;
}

}  // namespace torchrpc
