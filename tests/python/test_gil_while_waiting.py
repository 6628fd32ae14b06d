"""A thread that waits for a short call keeps the GIL, but never so that another thread cannot go on."""

import threading
import time

import torch
from waiting import eventually

import torchrpc.rpc as rpc
from torchrpc.testing import workers


def nothing():
    pass


def last_until_exists(path):
    eventually(path.exists, 50)


def call_back(name, depth):
    """Call `name`, which waits for this call, and is called back in turn."""
    return 1 + rpc.rpc_sync(name, call_back, args=(rpc.get_worker_info().name, depth - 1)) if depth else 0


def test_a_python_thread_goes_on_beside_a_thread_that_calls_without_a_pause():
    with workers(2) as (_, name):
        stop = threading.Event()
        counts = []

        def count():
            while not stop.is_set():
                counts.append(len(counts))

        thread = threading.Thread(target=count)
        thread.start()
        try:
            until = time.monotonic() + 20
            before = 0
            for _ in range(5):  # it counts on in each of five rounds
                while len(counts) <= before:
                    assert time.monotonic() < until
                    rpc.rpc_sync(name, nothing)
                before = len(counts)
        finally:
            stop.set()
            thread.join()


def test_a_thread_that_waits_for_the_gil_gets_it_while_another_waits_for_a_long_call(tmp_path):
    with workers(2) as (_, name):
        future = rpc.rpc_async(name, last_until_exists, args=(tmp_path / "got",))
        thread = threading.Thread(target=(tmp_path / "got").touch)
        thread.start()
        future.wait()
        thread.join()


def test_functions_of_a_caller_that_waits_are_served():
    with workers(2) as (own_name, name):
        assert rpc.rpc_sync(name, call_back, args=(own_name, 20)) == 20


def test_many_threads_receive_their_own_results():
    with workers(2) as (_, name):
        wrong = []

        def call(number):
            for i in range(300):
                value = number * 1000 + i
                if i % 2:
                    result = rpc.rpc_sync(name, torch.add, args=(torch.tensor(value), 1)).item()
                else:
                    result = rpc.rpc_async(name, torch.add, args=(torch.tensor(value), 1)).wait().item()
                if result != value + 1:
                    wrong.append((value, result))

        threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
