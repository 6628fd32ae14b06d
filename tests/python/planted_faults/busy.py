"""No fault: three workers call each other, nested and from several threads, and take locks in one order."""

import os
import threading

import torchrpc.rpc as rpc

RANK = int(os.environ["RANK"])
first, second = threading.Lock(), threading.RLock()


def visit(depth):
    with first, second:
        pass
    with second:
        pass
    return rpc.rpc_sync(f"worker{(RANK + 1) % 3}", visit, args=(depth - 1,)) if depth else RANK


def work():
    while True:
        rpc.rpc_sync(f"worker{(RANK + 2) % 3}", visit, args=(5,))


if __name__ == "__main__":
    rpc.init_rpc(f"worker{RANK}", rank=RANK, world_size=3)
    for _ in range(3):
        threading.Thread(target=work, daemon=True).start()
    work()
