"""A worker of test_hosts.py: forms a group of its own for each given URL; prints where the group's worker listens.

Prints one line of JSON: for each URL the list of addresses. A group's store listens at `PORT` of its URL, and is left
out.
"""

import json
import sys
from pathlib import Path

import torchrpc.rpc as rpc

sys.path.insert(0, str(Path(__file__).parents[1]))
from chaos_cases import unauthenticated_peers


def addresses(url):
    stores = set(unauthenticated_peers.listening())  # of the groups before
    options = rpc.TensorPipeRpcBackendOptions(init_method=url)
    rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
    port = int(url.rpartition(":")[2])
    found = {address for address, at in set(unauthenticated_peers.listening()) - stores if at != port}
    rpc.shutdown()
    return sorted(found)


if __name__ == "__main__":
    print(json.dumps([addresses(url) for url in sys.argv[1:]]))
