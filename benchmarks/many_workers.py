"""Many workers on one host, each of which calls all others: seconds, descriptors, threads and memory of each worker.

python benchmarks/many_workers.py [workers] [calls to each peer]
"""

import os
import resource
import sys
import tempfile
import time

import torch

import torchrpc.rpc as rpc


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def memory() -> tuple[int, int]:
    """Return MiB of this process: private memory, and its share of shared memory (which includes the rings)."""
    fields = {}
    with open("/proc/self/smaps_rollup") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if rest.strip().endswith("kB"):
                fields[name] = int(rest.split()[0]) // 1024
    return fields["Private_Clean"] + fields["Private_Dirty"], fields.get("Pss_Shmem", 0)


def work(rank: int, workers: int, calls: int, store: str, out: int) -> None:
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", num_worker_threads=4, rpc_timeout=60)
    start = time.monotonic()
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=workers, rpc_backend_options=options)
    initialized = time.monotonic()
    one = torch.ones(4)
    peers = [peer for peer in range(workers) if peer != rank]
    for _ in range(calls):
        futures = [rpc.rpc_async(f"worker{peer}", torch.add, args=(one, peer)) for peer in peers]
        for peer, future in zip(peers, futures, strict=True):
            assert future.wait()[0] == 1 + peer
    finished = time.monotonic()
    private, shared = memory()
    threads = len(os.listdir("/proc/self/task"))
    os.write(
        out, f"{initialized - start} {finished - initialized} {descriptors()} {threads} {private} {shared}\n".encode()
    )
    rpc.shutdown()


def main() -> int:
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    calls = int(sys.argv[2]) if len(sys.argv) > 2 else 10
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    store = os.path.join(tempfile.mkdtemp(), "store")
    read, write = os.pipe()
    children = []
    for rank in range(workers):
        pid = os.fork()
        if pid == 0:
            work(rank, workers, calls, store, write)
            os._exit(0)
        children.append(pid)
    os.close(write)
    failed = sum(os.waitpid(child, 0)[1] != 0 for child in children)
    rows = [[float(field) for field in line.split()] for line in os.fdopen(read).read().splitlines()]
    print(f"{workers} workers, {calls} calls to each peer; {failed} failed")
    names = ("init s", "calls s", "descriptors", "threads", "private MiB", "share of rings MiB")
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        print(f"{name:>20}: {min(column):10.2f} to {max(column):10.2f}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
