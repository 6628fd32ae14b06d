"""Mistakes of the first hour: each has an error of its own within 5 seconds, in one sentence that names the remedy."""

import time

import pytest
import torch

import torchrpc.rpc as rpc
from torchrpc import autograd as dist_autograd
from torchrpc.testing import free_port, workers

LONGEST_S = 5.0


@pytest.fixture(scope="module")
def group():
    with workers(2):
        yield


@pytest.fixture(scope="module")
def rref(group):
    return rpc.remote("worker1", torch.ones, args=([2],))


def options(**wrong):
    return lambda _: rpc.TensorPipeRpcBackendOptions(**wrong)


def set_attribute(name, value):
    return lambda _: setattr(rpc.TensorPipeRpcBackendOptions(), name, value)


WRONG_ARGUMENTS = {
    "a time-out of to_here": (
        lambda rref: rref.to_here("x"),
        r"to_here\(\): .*takes \(timeout: float.*called with \(str\)",
    ),
    "a keyword of to_here": (lambda rref: rref.to_here(timeouts=1), r"to_here\(\): .*called with \(timeouts=int\)"),
    "a proxy's time-out": (lambda rref: rref.rpc_sync("x"), r"rpc_sync\(\): .*takes \(timeout: float"),
    "a reference's context": (lambda rref: rref.backward("x"), r"backward\(\): .*takes \(dist_autograd_ctx_id: int"),
    "too many arguments": (lambda _: rpc.RRef(1, 2, 3), r"RRef\(\): .*called with \(int, int, int\)"),
    "a worker": (lambda _: rpc.get_worker_info(1.5), r"get_worker_info\(\): .*called with \(float\)"),
    "a missing argument": (lambda _: rpc.WorkerInfo("a"), r"WorkerInfo\(\): .*takes \(name: str, id: int\)"),
    "a context": (lambda _: dist_autograd.get_gradients("x"), r"get_gradients\(\): .*takes \(context_id: int\)"),
    "roots": (lambda _: dist_autograd.backward(1, None), r"roots must be a list of tensors, but is a NoneType"),
    "a root": (lambda _: dist_autograd.backward(1, [1.0]), r"roots must be a list of tensors, but has a float"),
    "the context of a pass": (
        lambda _: dist_autograd.backward("x", []),
        r"context_id must be the int that context\(\)",
    ),
    "rpc_timeout": (options(rpc_timeout="x"), "rpc_timeout must be a number of seconds, but is a str: 'x'"),
    "num_worker_threads": (options(num_worker_threads="4"), "num_worker_threads must be an int, but is a str: '4'"),
    "_transports": (options(_transports=5), "_transports must be a list of str, but is a int: 5"),
    "an attribute": (set_attribute("rpc_timeout", "x"), "this attribute takes a value of type float, not str"),
    "another attribute": (
        set_attribute("num_worker_threads", "x"),
        "this attribute takes a value of type int, not str",
    ),
}


@pytest.mark.parametrize("mistake", WRONG_ARGUMENTS)
def test_a_wrong_argument_is_named_in_one_line(rref, mistake):
    call, text = WRONG_ARGUMENTS[mistake]
    start = time.monotonic()
    with pytest.raises(TypeError, match=text) as raised:
        call(rref)
    assert time.monotonic() - start < LONGEST_S
    assert "\n" not in str(raised.value) and "Invoked with" not in str(raised.value)


def test_backward_takes_a_single_tensor(group):
    weight = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, rpc.rpc_sync("worker1", torch.mul, args=(weight, 3)).sum())
        assert dist_autograd.get_gradients(context_id)[weight].tolist() == [3.0, 3.0]


WORKER1_DIES = """
import multiprocessing as mp, os, signal, sys, time
import torchrpc.rpc as rpc

def run(rank):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{sys.argv[1]}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        rpc.shutdown()
    except rpc.WorkerLostError as error:
        print(error.worker, error, time.monotonic() - start < 5, sep="|")

if __name__ == "__main__":
    context = mp.get_context("fork")
    processes = [context.Process(target=run, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
"""


def test_shutdown_after_a_loss_says_one_sentence_and_nothing_else(run_python, tmp_path):
    (tmp_path / "program.py").write_text(WORKER1_DIES)
    result = run_python(tmp_path / "program.py", free_port())
    sentence = "worker0 has shut down without worker1, lost before the group had ended."
    assert result.stdout.splitlines() == [f"worker1|{sentence}|True"]
    assert result.stderr == ""
