"""A function that holds the GIL: what needs no Python goes on meanwhile."""

import ctypes
import os
import signal

import numpy as np
import torch
from waiting import eventually

import torchrpc.rpc as rpc
from torchrpc.testing import workers

arrived = False


def take(tensor):
    global arrived
    arrived = tensor.numel() > 0


def has_arrived():
    return arrived


def resume_and_call(pid, fifo):
    """Let worker1 read on, and call worker0 when worker1 has read all."""
    try:
        os.kill(pid, signal.SIGCONT)
        eventually(lambda: rpc.rpc_sync("worker1", has_arrived), seconds=60)
        return [rpc.rpc_sync("worker0", torch.add, args=(torch.ones(1), i), timeout=20).item() for i in range(3)]
    finally:
        fifo = os.open(fifo, os.O_WRONLY)
        os.write(fifo, b".")
        os.close(fifo)


def test_the_memory_of_an_array_that_was_sent_is_not_freed_where_calls_arrive(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    fifo = os.open(tmp_path / "fifo", os.O_RDWR)
    read_with_gil = ctypes.PyDLL(None).read
    with workers(3, transport="tcp") as names:
        pid = rpc.rpc_sync(names[1], os.getpid)
        assert rpc.rpc_sync(names[2], torch.add, args=(torch.ones(1), 1)).item() == 2
        os.kill(pid, signal.SIGSTOP)
        # More than the sockets hold: the loop of this worker writes the rest, after which nothing refers to the array.
        sent = rpc.rpc_async(names[1], take, args=(torch.from_numpy(np.ones(64 << 20, np.uint8)),))
        answers = rpc.rpc_async(names[2], resume_and_call, args=(pid, str(tmp_path / "fifo")))
        assert read_with_gil(fifo, ctypes.create_string_buffer(1), 1) == 1
        assert answers.wait() == [1, 2, 3]
        sent.wait()
    os.close(fifo)
