// Small messages over Unix sockets, with descriptors; descriptors in forked children.

#include "transport/native/socket/socket.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <fcntl.h>
#include <filesystem>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

using namespace torchrpc::native;

TEST_CASE("of two descriptors that come with a message, one is received and the other is closed") {
  const auto openDescriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
  };
  int ends[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  const Descriptor here(ends[0]), there(ends[1]);
  const auto before = openDescriptors();
  {
    char byte = 'x';
    iovec part{&byte, 1};
    union {
      cmsghdr header;
      char space[CMSG_SPACE(2 * sizeof(int))];
    } control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = &control;
    message.msg_controllen = sizeof(control);
    control.header.cmsg_level = SOL_SOCKET;
    control.header.cmsg_type = SCM_RIGHTS;
    control.header.cmsg_len = CMSG_LEN(2 * sizeof(int));
    const int sent[2] = {there.get(), there.get()};
    std::memcpy(CMSG_DATA(&control.header), sent, sizeof(sent));
    REQUIRE(::sendmsg(there.get(), &message, 0) == 1);
    Descriptor received;
    REQUIRE(receive(here.get(), &byte, 1, &received) == 1);
    CHECK(received);
    CHECK(openDescriptors() == before + 1);
  }
  CHECK(openDescriptors() == before);
}

TEST_CASE("a forked child has none of the descriptors, and its parent all of them") {
  std::vector<Descriptor> all;
  for (int i = 0; i < 70; ++i)
    all.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));  // more than a word has bits
  const int kept = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  struct stat null{};
  REQUIRE(::fstat(kept, &null) == 0);
  // Handlers of libraries may open other descriptors in the child, with these numbers.
  const auto is_open = [&null](int fd) {
    struct stat status{};
    return ::fstat(fd, &status) == 0 && status.st_rdev == null.st_rdev;
  };
  const auto child = ::fork();
  if (child == 0) {
    const bool any = std::ranges::any_of(all, [&](const Descriptor& each) { return is_open(each.get()); });
    ::_exit(!any && is_open(kept) ? 0 : 1);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(std::ranges::all_of(all, [&](const Descriptor& each) { return is_open(each.get()); }));
  ::close(kept);
}
