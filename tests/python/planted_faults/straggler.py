"""One worker of three matches a regular expression that takes for ever, and `re` keeps the GIL: a straggler."""

import os
import re

import torchrpc.rpc as rpc

RANK = int(os.environ["RANK"])


def parse(text):
    return re.match(r"(a+)+$", text) is not None


if __name__ == "__main__":
    rpc.init_rpc(f"worker{RANK}", rank=RANK, world_size=3)
    if RANK == 0:
        rpc.rpc_sync("worker1", parse, args=("a" * 60 + "b",), timeout=600)
    rpc.shutdown()
