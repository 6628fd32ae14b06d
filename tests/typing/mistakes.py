"""Mistakes that type checkers report: each line with `# error` has one, and no other line has."""

import torchrpc
import torchrpc.rpc as rpc


def length(text: str) -> int:
    return len(text)


text: str = rpc.rpc_sync("worker1", length, args=("a",))  # error
future: torchrpc.Future[str] = rpc.rpc_async("worker1", length, args=("a",))  # error
rpc.rpc_sync("worker1", "length")  # error
rpc.rpc_sync("worker1", length, timeout="1")  # error
rpc.rpc_sync(1.5, length)  # error
reference: rpc.RRef[str] = rpc.remote("worker1", length, args=("a",))  # error
rpc.TensorPipeRpcBackendOptions(threads=4)  # error
