"""A worker makes 1,000 remote tensors and keeps all references to them: a leak."""

import os
import time

import torch

import torchrpc.rpc as rpc

RANK = int(os.environ["RANK"])
seen = []


def step():
    batch = rpc.remote("worker1", torch.ones, args=([8],))
    seen.append(batch)
    return batch.to_here().sum()


if __name__ == "__main__":
    rpc.init_rpc(f"worker{RANK}", rank=RANK, world_size=3)
    if RANK == 0:
        for _ in range(1000):
            step()
        time.sleep(3600)  # until the test has looked and kills it
    rpc.shutdown()
