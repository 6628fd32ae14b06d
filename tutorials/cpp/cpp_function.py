"""Calls a function written in C++ between Python workers, and compares it with the same function in Python.

    cmake -S tutorials/cpp -B build/tutorials -DCMAKE_PREFIX_PATH=$(python -c "import torchrpc; \
        print(torchrpc.cmake_prefix_path)") && cmake --build build/tutorials
    python cpp_function.py build/tutorials/libcpp_function.so

The callee only has to load the library (cpp_function.cpp), which registers the function. Calls of the Python function
share the GIL: while one call runs, other calls and the callee's own Python code wait. Calls of the C++ function run in
parallel and do not hold the GIL.
"""

import argparse
import os
import random
import socket
import string
import threading
import time

import torch
import torch.multiprocessing as mp

import torchrpc.rpc as rpc
from torchrpc import cpp_function


def distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def distances(word, words):
    """Return the Levenshtein distance of a word to each word of a list."""
    return [distance(word, each) for each in words]


def steps_in(seconds):
    """Run Python code on the callee for `seconds`, while it serves calls; return how many steps the code has made."""
    steps, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(100))
        steps += 1
    return steps


def measure(function, words, seconds):
    """Return the calls per second of eight callers, and the steps of the callee's own code in that time."""
    end = time.perf_counter() + seconds
    counts = []

    def call_until_end():
        count = 0
        while time.perf_counter() < end:
            rpc.rpc_sync("callee", function, args=(words[count % len(words)], words))
            count += 1
        counts.append(count)

    callers = [threading.Thread(target=call_until_end) for _ in range(8)]
    for caller in callers:
        caller.start()
    steps = rpc.rpc_sync("callee", steps_in, args=(seconds,))
    for caller in callers:
        caller.join()
    return sum(counts) / seconds, steps


def run(rank, options):
    torch.set_num_threads(1)
    if rank == 1:
        torch.ops.load_library(options.library)
    rpc.init_rpc(("caller", "callee")[rank], rank=rank, world_size=2)
    if rank == 0:
        generator = random.Random(0)
        words = ["".join(generator.choices(string.ascii_lowercase, k=12)) for _ in range(options.words)]
        cpp_distances = cpp_function("distances")
        for word in words:
            results = [rpc.rpc_sync("callee", function, args=(word, words)) for function in (distances, cpp_distances)]
            assert results[0] == results[1], "the two functions differ"
        rates = []
        for language, function in (("Python", distances), ("C++", cpp_distances)):
            rate, steps = measure(function, words, options.seconds)
            print(
                f"{language}: {rate:.0f} calls/s, beside {steps / options.seconds:.0f} steps/s of the callee's own code"
            )
            rates.append(rate)
        print(f"The C++ function is called {rates[1] / rates[0]:.1f} times as often, with the same results.")
    rpc.shutdown()


def use_free_port():
    """Set the rendezvous address to a free port of this host, unless the environment sets it."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        os.environ.setdefault("MASTER_PORT", str(probe.getsockname()[1]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", help="libcpp_function.so")
    parser.add_argument("--seconds", type=float, default=2, help="time to measure each function (default %(default)s)")
    parser.add_argument("--words", type=int, default=50, help="words in the list (default %(default)s)")
    options = parser.parse_args()
    use_free_port()
    mp.spawn(run, (options,), nprocs=2)


if __name__ == "__main__":
    main()
