"""Three workers pass weights around a ring. Each keeps its lock while it pulls from the next: a deadlock."""

import os
import threading

import torch

import torchrpc.rpc as rpc

RANK = int(os.environ["RANK"])
weights = torch.ones(3)
lock = threading.Lock()
all_are_here = threading.Barrier(3)


def meet():
    all_are_here.wait()


def pull():
    with lock:
        return weights


def mix():
    with lock:
        rpc.rpc_sync("worker0", meet)
        weights.add_(rpc.rpc_sync(f"worker{(RANK + 1) % 3}", pull))


if __name__ == "__main__":
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=600)
    rpc.init_rpc(f"worker{RANK}", rank=RANK, world_size=3, rpc_backend_options=options)
    mix()
    rpc.shutdown()
