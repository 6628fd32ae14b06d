"""In a distributed autograd context, calls that are made with grad disabled are as local ones: nothing is recorded."""

import pytest
import torch

import torchrpc.autograd as dist_autograd
import torchrpc.rpc as rpc
from torchrpc.testing import workers

WEIGHT = torch.ones(2, requires_grad=True)


@pytest.fixture(scope="module", autouse=True)
def group():
    with workers(3):
        yield


def times_weight(x):
    return WEIGHT * x


def weight():
    return WEIGHT


def is_grad_enabled():
    return torch.is_grad_enabled()


def is_grad_enabled_further(to):
    return rpc.rpc_sync(to, is_grad_enabled)


def times_weight_further(to, x):
    return rpc.rpc_sync(to, times_weight, (x,)) * WEIGHT


def enabling(x):
    with torch.enable_grad():
        return WEIGHT * x


@rpc.functions.async_execution
def times_weight_later(to, x):
    return rpc.rpc_async(to, times_weight, (x,)).then(lambda done: done.wait() * WEIGHT)


async def times_weight_awaited(to, x):
    return (await rpc.rpc_async(to, times_weight, (x,))) * WEIGHT


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(2).requires_grad_() * x


CALLS = {
    "rpc_sync": lambda x: rpc.rpc_sync("worker1", times_weight, (x,)),
    "rpc_async": lambda x: rpc.rpc_async("worker1", times_weight, (x,)).wait(),
    "remote": lambda x: rpc.remote("worker1", times_weight, (x,)).to_here(),
    "itself": lambda x: rpc.rpc_sync("worker0", times_weight, (x,)),
    "operator": lambda x: rpc.rpc_sync("worker1", torch.mul, (x, 2)),
    "script": lambda x: rpc.rpc_sync("worker1", scripted, (x,)),
    "nested": lambda x: rpc.rpc_sync("worker1", times_weight_further, ("worker2", x)),
    "async function": lambda x: rpc.rpc_sync("worker1", times_weight_later, ("worker2", x)),
    "coroutine": lambda x: rpc.rpc_sync("worker1", times_weight_awaited, ("worker2", x)),
    "parameter": lambda x: rpc.rpc_sync("worker1", weight),
    "enabled there": lambda x: rpc.rpc_sync("worker1", enabling, (x,)),
    "argument": lambda x: rpc.rpc_sync("worker1", torch.clone, (x,)),
}
GUARDS = [torch.no_grad, torch.inference_mode]


def recorded(context_id):
    context = dist_autograd._retrieve_context(context_id)
    return len(context._send_functions()) + len(context._recv_functions())


def recorded_there(context_id):
    try:
        return recorded(context_id)
    except RuntimeError:  # the worker knows no such context
        return 0


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_without_grad_is_not_recorded_and_its_result_requires_none(call, guard):
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        with guard():
            result = call(x)
        assert not result.requires_grad and result.grad_fn is None
        assert recorded(context_id) == 0
        for worker in ("worker1", "worker2"):
            assert rpc.rpc_sync(worker, recorded_there, (context_id,)) == 0
        assert call(x).requires_grad  # outside of the guard


def test_a_remote_value_that_was_made_without_grad_requires_none_later():
    with dist_autograd.context():
        with torch.no_grad():
            made = rpc.remote("worker1", times_weight, (torch.ones(2),))
            made.to_here()
        assert not made.to_here().requires_grad


@pytest.mark.parametrize("guard", GUARDS)
def test_a_value_fetched_without_grad_requires_none(guard):
    with dist_autograd.context() as context_id:
        made = rpc.remote("worker1", times_weight, (torch.ones(2),))
        with guard():
            assert not made.to_here().requires_grad
        assert recorded(context_id) == 0
        assert made.to_here().requires_grad and recorded(context_id) == 1


def test_grad_that_is_enabled_within_no_grad_is_recorded():
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        with torch.no_grad(), torch.enable_grad():
            loss = rpc.rpc_sync("worker1", times_weight, (x,)).sum()
        dist_autograd.backward(context_id, [loss])
        assert torch.equal(dist_autograd.get_gradients(context_id)[x], torch.ones(2))


def test_inference_mode_is_stronger_than_enable_grad_as_locally():
    with dist_autograd.context() as context_id:
        with torch.inference_mode(), torch.enable_grad():
            assert not (WEIGHT * 2).requires_grad
            assert not CALLS["rpc_sync"](torch.ones(2)).requires_grad
        assert recorded(context_id) == 0


def test_the_callee_runs_the_function_without_grad_in_the_context_only():
    with torch.no_grad():
        assert rpc.rpc_sync("worker1", is_grad_enabled)
        with dist_autograd.context():
            assert not rpc.rpc_sync("worker1", is_grad_enabled)
            assert not rpc.rpc_sync("worker1", is_grad_enabled_further, ("worker2",))
    with dist_autograd.context():
        assert rpc.rpc_sync("worker1", is_grad_enabled)


def test_calls_with_and_without_grad_mix_in_a_pass():
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        with torch.no_grad():
            factor = rpc.rpc_sync("worker1", times_weight, (x * 3,))
        loss = (rpc.rpc_sync("worker2", times_weight, (x,)) * factor).sum()
        dist_autograd.backward(context_id, [loss])
        assert torch.equal(dist_autograd.get_gradients(context_id)[x], torch.full((2,), 3.0))
