"""A forked child inherits memory, but no part in the group: what it drops, calls or closes leaves the parent alone."""

import asyncio
import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from waiting import eventually

import torchrpc
import torchrpc.autograd as dist_autograd
import torchrpc.rpc as rpc
from torchrpc import testing
from torchrpc._C import _rref_context_get_debug_info

FORKED = "this process was forked from .* call init_rpc"


def in_child(body, seconds=60):
    """Run `body` in a forked child and return its text; "" if it returned None."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        signal.alarm(seconds)
        text = "failed"
        try:
            text = str(body() or "")
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        finally:
            os.write(write, text.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0, "the child hung or crashed"
    return text


def owned():
    return int(_rref_context_get_debug_info()["num_owner_rrefs"])


def expect_unharmed(rref, value):
    assert rref.to_here().item() == value
    assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1)).item() == 2
    assert rpc.rpc_sync("worker1", owned) == 1


def test_a_child_that_drops_an_rref_leaves_it_to_the_parent():
    with testing.workers(2):
        rref = rpc.remote("worker1", torch.add, args=(torch.ones(1), 1))
        assert rref.to_here().item() == 2

        def drop():
            nonlocal rref
            del rref
            gc.collect()
            time.sleep(0.2)  # a thread of the child would release it meanwhile

        assert in_child(drop) == ""
        expect_unharmed(rref, 2)


class Values(torch.utils.data.Dataset):
    def __init__(self, rref):
        self.rref = rref

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


def test_workers_of_a_data_loader_inherit_a_data_set_with_an_rref():
    with testing.workers(2):
        rref = rpc.remote("worker1", torch.add, args=(torch.ones(1), 1))
        rref.to_here()
        loader = torch.utils.data.DataLoader(Values(rref), num_workers=2, multiprocessing_context="fork")
        for _ in range(2):
            assert [int(batch) for batch in loader] == list(range(8))
        expect_unharmed(rref, 2)


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda rref: rpc.rpc_sync("worker1", torch.ones, args=([1],)), id="rpc_sync"),
        pytest.param(lambda rref: rpc.remote("worker1", torch.ones, args=([1],)), id="remote"),
        pytest.param(lambda rref: rref.to_here(), id="to_here"),
        pytest.param(lambda rref: rref.rpc_sync().size(), id="proxy"),
        pytest.param(lambda rref: rpc.RRef(1), id="RRef"),
        pytest.param(lambda rref: rpc.shutdown(), id="shutdown"),
        pytest.param(lambda rref: rpc.get_worker_info(), id="get_worker_info"),
    ],
)
def test_the_error_of_a_use_in_a_child_says_what_to_do(use):
    with testing.workers(2):
        rref = rpc.remote("worker1", torch.add, args=(torch.ones(1), 1))
        rref.to_here()
        text = in_child(lambda: use(rref))
        assert text.startswith("ShutdownError") and "forked from that of worker0" in text.replace(
            "forked from the one of", "forked from that of"
        ), text
        assert "call init_rpc" in text
        expect_unharmed(rref, 2)


def wait_for_all(future):
    return torch.futures.wait_all([future])


async def wait_in_asyncio(future):
    await future


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda future: future.wait(), id="wait"),
        pytest.param(wait_for_all, id="wait_all"),
        pytest.param(lambda future: torchrpc.wait([future]), id="torchrpc.wait"),
        pytest.param(lambda future: asyncio.run(wait_in_asyncio(future)), id="asyncio"),
    ],
)
def test_a_future_of_the_parent_that_is_not_done_is_refused_in_a_child(use, tmp_path):
    with testing.workers(2):
        path = str(tmp_path / "release")
        future = rpc.rpc_async("worker1", wait_for_path, args=(path,))
        text = in_child(lambda: use(future), seconds=20)
        assert text.startswith("ShutdownError") and re.search(FORKED, text), text
        open(path, "w").close()
        assert future.wait() == path
        assert in_child(lambda: future.wait()) == path  # what is there can be read


@pytest.mark.parametrize(
    "depend",
    [
        pytest.param(lambda future: future.then(lambda done: done.wait()), id="then"),
        pytest.param(lambda future: future.then(id).then(id), id="then of then"),
        pytest.param(lambda future: torch.futures.collect_all([future]), id="collect_all"),
    ],
)
def test_what_depends_on_a_future_of_the_parent_is_refused_in_a_child(depend, tmp_path):
    with testing.workers(2):
        path = str(tmp_path / "release")
        dependent = depend(rpc.rpc_async("worker1", wait_for_path, args=(path,)))
        text = in_child(lambda: dependent.wait(), seconds=20)
        assert text.startswith("ShutdownError") and re.search(FORKED, text), text
        open(path, "w").close()
        dependent.wait()


def wait_for_path(path):
    eventually(lambda: os.path.exists(path))
    return path


def test_a_child_leaves_a_context_of_the_parent_in_silence():
    with testing.workers(2):
        with dist_autograd.context() as context:
            leaf = torch.ones(1, requires_grad=True)
            loss = rpc.rpc_sync("worker1", torch.mul, args=(leaf, 3)).sum()
            if (pid := os.fork()) != 0:
                assert os.waitpid(pid, 0)[1] == 0
                dist_autograd.backward(context, [loss])
                assert dist_autograd.get_gradients(context)[leaf].item() == 3
        if pid == 0:
            os._exit(0)


def alone(url):
    rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=url))
    result = rpc.rpc_sync("worker0", torch.add, args=(torch.ones(1), 2)).item()
    rpc.shutdown()
    return result


def test_a_child_can_initialize_rpc_anew(tmp_path):
    with testing.workers(2):
        rref = rpc.remote("worker1", torch.add, args=(torch.ones(1), 1))
        for i in range(3):
            assert in_child(lambda i=i: alone(f"file://{tmp_path}/store{i}")) == "3.0"
        assert in_child(lambda: in_child(lambda: alone(f"file://{tmp_path}/grandchild"))) == "3.0"
        expect_unharmed(rref, 2)


def test_a_process_can_fork_while_its_threads_make_calls(tmp_path):
    with testing.workers(2):
        ended = threading.Event()
        failures = []

        def call():
            while not ended.is_set():
                try:
                    rref = rpc.remote("worker1", torch.add, args=(torch.ones(1), 1))
                    assert rref.to_here().item() == 2
                except Exception as error:
                    failures.append(error)
                    return

        callers = [threading.Thread(target=call) for _ in range(3)]
        for caller in callers:
            caller.start()
        try:
            for i in range(15):
                assert in_child(lambda i=i: alone(f"file://{tmp_path}/store{i}")) == "3.0"
        finally:
            ended.set()
            for caller in callers:
                caller.join()
        assert not failures


def fork_and_return():
    pid = os.fork()
    if pid != 0:
        os.waitpid(pid, 0)
    return pid


def test_a_function_that_forks_answers_once():
    with testing.workers(2):
        for _ in range(3):
            assert rpc.rpc_sync("worker1", fork_and_return) > 0
        assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1)).item() == 2


def fork_a_sleeper():
    pid = os.fork()
    if pid == 0:
        time.sleep(60)  # the child outlives its parent
        os._exit(0)
    return pid


@pytest.mark.parametrize("transport", ["native", "tcp"])
def test_the_end_of_a_worker_is_seen_although_its_child_lives(transport):
    with pytest.raises(testing.RankError), testing.workers(2, transport=transport):
        sleeper = rpc.rpc_sync("worker1", fork_a_sleeper)
        pid = rpc.rpc_sync("worker1", os.getpid)
        start = time.monotonic()
        try:
            with pytest.raises(RuntimeError, match="worker1"):
                rpc.rpc_sync("worker1", os.kill, args=(pid, signal.SIGKILL))
            assert time.monotonic() - start < 20  # the time-out of silent workers and the life of the child are longer
        finally:
            os.kill(sleeper, signal.SIGKILL)
            rpc.shutdown(graceful=False)


def test_a_child_that_runs_to_the_end_of_the_interpreter_is_silent(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys
            import torch
            import torchrpc.rpc as rpc

            rpc.init_rpc("worker0", rank=0, world_size=1)
            kept = rpc.remote("worker0", torch.ones, args=([2],))
            future = rpc.rpc_async("worker0", torch.ones, args=([2],))
            pid = os.fork()
            if pid == 0:
                sys.exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            assert kept.to_here().tolist() == [1, 1] and future.wait().tolist() == [1, 1]
            rpc.shutdown()
            if (pid := os.fork()) == 0:
                sys.exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            print("done")
            """
        )
    )
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(testing.free_port())}
    ended = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0 and ended.stdout == "done\n" and not ended.stderr, ended.stderr


def test_a_child_keeps_no_descriptor_of_the_parent():
    with testing.workers(2):
        rpc.rpc_sync("worker1", torch.ones, args=([1],))

        def sockets():
            found = 0
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
            return found

        before = sockets()
        assert before > int(in_child(sockets))
