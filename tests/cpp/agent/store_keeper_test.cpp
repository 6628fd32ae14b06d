// The keeper of a store, and a store that is served again.

#include "group/store_keeper.h"

#include <catch2/catch.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "group/rendezvous.h"
#include "outcomes.h"

using namespace torchrpc;
using namespace torchrpc::test;
using namespace std::chrono_literals;

namespace {

StoreKeeper::Bytes storeBytes(const std::string& text) { return {text.begin(), text.end()}; }

const std::pair<std::string, StoreKeeper::Bytes> kOwnEntry = {"worker/1", storeBytes("worker1")};

/// A store that this process serves, and a keeper of it.
struct ServedStore {
  c10::intrusive_ptr<c10d::TCPStore> store = [] {
    c10d::TCPStoreOptions options;
    options.port = 0;  // of the system
    options.isServer = true;
    options.waitWorkers = false;
    return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  }();
  StoreKeeper keeper{{"127.0.0.1", store->getPort()}, kOwnEntry, [] {
                       return StoreKeeper::Entries{{"worker/0", storeBytes("worker0")}, kOwnEntry};
                     }};

  StorePtr part(int32_t number) const { return partOfGroup(store, number); }
};

}  // namespace

TEST_CASE("a store that is served again gets the members of the living group, and what has begun there is over") {
  ServedStore here;
  here.part(0)->set("worker/0", storeBytes("worker0, started again"));
  CHECK(here.keeper.findGroup(10s) == nullptr);
  here.keeper.onStoreLost();
  REQUIRE(eventually([&] { return hasEnded(*here.part(0)); }));
  CHECK(here.part(1)->get("worker/0") == storeBytes("worker0"));
  CHECK(here.part(1)->get("worker/1") == storeBytes("worker1"));
  CHECK_FALSE(hasEnded(*here.part(1)));
  const auto group = here.keeper.findGroup(10s);
  REQUIRE(group);
  CHECK(group->get("worker/1") == storeBytes("worker1"));
  CHECK(enterGroup(here.store, 0, 0).number == 1);
}
