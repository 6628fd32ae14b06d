"""A first contact that fails for a moment: the call waits, and nobody counts as lost."""

import contextlib
import os
import resource
import signal
import threading
import time

import pytest
import torch
from waiting import stop

import torchrpc.rpc as rpc
from torchrpc.testing import workers


def owner_of_ones():
    return rpc.RRef(torch.ones(2))


def expect_contact(name):
    """Call the worker, and use RRefs in both directions."""
    assert rpc.rpc_sync(name, torch.add, args=(torch.ones(1), 1), timeout=30).item() == 2
    mine = rpc.RRef(torch.ones(2))
    assert rpc.rpc_sync(name, fetch, args=(mine,), timeout=30) == 2
    assert rpc.rpc_sync(name, owner_of_ones, timeout=30).to_here().sum() == 2


def fetch(rref):
    return rref.to_here().sum().item()


def pid_of(name):
    return rpc.rpc_sync(name, os.getpid)


@contextlib.contextmanager
def no_descriptors():
    """While it lasts, this process gets no further descriptor; yields a function that ends it at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Everything below the lowest free number is in use. What other threads close meanwhile has greater numbers.
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def why_not(to, timeout):
    try:
        rpc.rpc_sync(to, torch.add, args=(1, 1), timeout=timeout)
    except rpc.RpcTimeoutError as error:
        return str(error)


def why_not_without_descriptors(to, timeout):
    with no_descriptors():
        return why_not(to, timeout)


def test_a_call_that_times_out_before_its_connection_is_open_says_why():
    # worker1 has called neither worker2 nor worker3 before.
    with workers(4):
        why = rpc.rpc_sync("worker1", why_not_without_descriptors, args=("worker2", 0.5), timeout=30)
        assert (
            "worker2 has not replied, because the connection to it is not open: this process has as many open files as "
            "`ulimit -n` allows: raise it"
        ) in why
        assert rpc.rpc_sync("worker1", call_from, args=("worker1", "worker2"), timeout=30) == 2
        pid = pid_of("worker3")
        stop(pid)
        try:
            why = rpc.rpc_sync("worker1", why_not, args=("worker3", 0.5), timeout=30)
            assert "connection to it is not open: worker3 has not answered yet" in why
        finally:
            os.kill(pid, signal.SIGCONT)
        expect_contact("worker3")
        with pytest.raises(rpc.RpcTimeoutError, match=r"worker3 has not replied\. Pass"):
            rpc.rpc_sync("worker3", time.sleep, args=(1,), timeout=0.2)


def test_a_call_waits_while_this_process_has_no_descriptor():
    with workers(2), no_descriptors() as end:
        restore = threading.Timer(0.5, end)
        restore.start()
        try:
            expect_contact("worker1")
        finally:
            restore.join()


def stop_for(pid, seconds):
    stop(pid)
    threading.Timer(seconds, os.kill, (pid, signal.SIGCONT)).start()


def call_from(name, to, timeout=30):
    return rpc.rpc_sync(to, torch.add, args=(torch.ones(1), 1), timeout=timeout).item()


def test_a_call_waits_for_a_worker_that_is_stopped_for_longer_than_a_handshake():
    with workers(3):
        # worker1 has not called worker2 before.
        stop_for(pid_of("worker2"), 12)
        start = time.monotonic()
        assert rpc.rpc_sync("worker1", call_from, args=("worker1", "worker2"), timeout=40) == 2
        assert time.monotonic() - start > 10
        expect_contact("worker2")
