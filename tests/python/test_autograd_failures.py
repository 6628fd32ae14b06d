"""Backward passes that fail: the error, the state that remains, and that the next pass works."""

import os
import tempfile

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from waiting import eventually

import torchrpc.autograd as dist_autograd
import torchrpc.rpc as rpc
from torchrpc.testing import workers


@pytest.fixture(scope="module", autouse=True)
def group():
    with workers(3) as names:
        yield names


class CustomError(Exception):
    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


def leaf():
    return torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)


weight = leaf()


def passes_under_way():
    return int(dist_autograd._get_debug_info()["num_current_backward_passes"])


def leaves_with_gradients(context_id):
    return len(dist_autograd.get_gradients(context_id))


def no_passes_on(names):
    return all(rpc.rpc_sync(name, passes_under_way) == 0 for name in names)


# --- errors of a part of the graph ---


def modified_after_saving(x):
    result = x.exp()
    return result.mul(weight), result.add_(1)


def modified_view_of_saved(x):
    base = x * 1
    result = base.sin() * weight
    base[1:].zero_()
    return result


def failing_hook(x):
    def hook(_):
        raise CustomError(7, "in a hook")

    result = x * weight
    result.register_hook(hook)
    return result


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, what):
        ctx.what = what
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        if ctx.what == "raises":
            raise KeyError("in backward")
        return {"too many": (gradient,) * 3, "wrong shape": (gradient.new_ones(2, 2), None)}[ctx.what]


def function_that_raises(x):
    return Failing.apply(x * weight, "raises")


def function_with_too_many_gradients(x):
    return Failing.apply(x * weight, "too many")


def function_with_a_wrong_shape(x):
    return Failing.apply(x * weight, "wrong shape")


def hook_with_a_wrong_shape(x):
    result = x * weight
    result.register_hook(lambda gradient: gradient[1:])
    return result


def hook_after_accumulation(x):
    own = leaf()

    def hook(_):
        raise ValueError("after accumulation")

    own.register_post_accumulate_grad_hook(hook)
    return x * own


def first_of(result):
    return result[0] if isinstance(result, tuple) else result


def run_part(part, x):
    return first_of(part(x))


PARTS = [
    failing_hook,
    function_that_raises,
    function_with_a_wrong_shape,
    function_with_too_many_gradients,
    hook_after_accumulation,
    hook_with_a_wrong_shape,
    modified_after_saving,
    modified_view_of_saved,
]


def local_error(part):
    with pytest.raises(Exception) as raised:
        run_part(part, leaf() * 2).sum().backward()
    return raised.value


@pytest.mark.parametrize("worker", ["worker0", "worker1", "worker2"])
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_errors_are_those_of_a_local_pass_and_name_the_worker(part, worker, group):
    error = local_error(part)
    with dist_autograd.context() as context_id:
        x = rpc.rpc_sync("worker1", torch.mul, (leaf(), 2))
        loss = rpc.rpc_sync("worker1", torch.sum, (rpc.rpc_sync(worker, run_part, (part, x)),))
        with pytest.raises(RuntimeError, match=f"^Error on Node {worker[-1]}: ") as raised:
            dist_autograd.backward(context_id, [loss])
        assert str(error).splitlines()[0] in str(raised.value)
        assert isinstance(raised.value, type(error))
        assert getattr(raised.value, "code", None) == getattr(error, "code", None)
        left = 1 if part is hook_after_accumulation else 0  # the hook had received it as .grad
        assert rpc.rpc_sync(worker, leaves_with_gradients, (context_id,)) == left
        eventually(lambda: no_passes_on(group))


failures_left = 0


def failing_at_first(times, x):
    """Fails in the middle of a backward pass, when the later part of the graph has its gradients."""
    global failures_left
    failures_left = times

    def hook(_):
        global failures_left
        if failures_left:
            failures_left -= 1
            raise CustomError(7, "for now")

    middle = x * weight
    middle.register_hook(hook)
    return middle * weight.exp()


def gradient_of_weight(context_id):
    return dist_autograd.get_gradients(context_id).get(weight)


@pytest.mark.parametrize("mode", ["smart", "fast"])
@pytest.mark.parametrize("worker", ["worker0", "worker1", "worker2"])
def test_the_next_pass_over_a_retained_graph_works(worker, mode, group):
    x, local_weight = leaf(), weight.detach().clone().requires_grad_()
    (x * 2 * local_weight * local_weight.exp()).sum().backward()
    with dist_autograd.context() as context_id:
        own = leaf()
        received = rpc.rpc_sync("worker1", torch.mul, (own, 2))
        output = rpc.rpc_sync(worker, failing_at_first, (2, received))
        loss = rpc.rpc_sync("worker1", torch.sum, (output,))
        for _ in range(2):
            with pytest.raises(CustomError, match=f"^Error on Node {worker[-1]}: for now"):
                dist_autograd.backward(context_id, [loss], retain_graph=True, mode=mode)
            assert rpc.rpc_sync(worker, gradient_of_weight, (context_id,)) is None
            eventually(lambda: no_passes_on(group))
        dist_autograd.backward(context_id, [loss], mode=mode)
        torch.testing.assert_close(rpc.rpc_sync(worker, gradient_of_weight, (context_id,)), local_weight.grad)
        torch.testing.assert_close(dist_autograd.get_gradients(context_id)[own], x.grad)


def square(x):
    return x.pow(2)


@pytest.mark.parametrize("worker", ["worker0", "worker1"])
def test_a_second_pass_without_retain_graph_is_torchs_error(worker):
    with dist_autograd.context() as context_id:
        x = rpc.rpc_sync("worker1", torch.add, (leaf(), 2))
        loss = rpc.rpc_sync(worker, square, (x,)).sum()
        dist_autograd.backward(context_id, [loss])
        with pytest.raises(
            RuntimeError, match=f"Node {worker[-1]}: Trying to backward through the graph a second time"
        ):
            dist_autograd.backward(context_id, [loss])


# --- anomaly mode ---


def nan_in_backward(x):
    return (x * 0).sqrt() * 0  # line of the forward pass


def detect_anomaly(on, check_nan=True):
    torch.autograd.set_detect_anomaly(on, check_nan)


class CapturedStderr:
    """Captures the output of this process to stderr, also that of C++."""

    def __init__(self):
        self.file = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.own = os.dup(2)
        os.dup2(self.file.fileno(), 2)

    def text(self):
        os.dup2(self.own, 2)
        self.file.seek(0)
        return self.file.read()


@pytest.mark.parametrize("worker", ["worker0", "worker1"])
def test_anomaly_mode_finds_nan_and_shows_its_source(worker):
    rpc.rpc_sync(worker, detect_anomaly, (True,))
    captured = rpc.remote(worker, CapturedStderr)
    try:
        with dist_autograd.context() as context_id:
            x = rpc.rpc_sync("worker1", torch.add, (leaf(), 2))
            loss = rpc.rpc_sync(worker, nan_in_backward, (x,)).sum()
            error = f"^Error on Node {worker[-1]}: Function 'SqrtBackward0' returned nan values in its 0th output"
            with pytest.raises(RuntimeError, match=error):
                dist_autograd.backward(context_id, [loss])
    finally:
        rpc.rpc_sync(worker, detect_anomaly, (False,))
        text = captured.rpc_sync().text()
    assert "Traceback of forward call that caused the error" in text, text
    assert "# line of the forward pass" in text, text


# --- unsupported passes ---


def sum_there(x):
    return x.sum()


def test_a_local_pass_over_a_remote_result_raises_an_error_with_advice():
    with dist_autograd.context():
        loss = rpc.rpc_sync("worker1", sum_there, (leaf(),))
        with pytest.raises(RuntimeError, match=r"use distributed autograd's backward\(context_id, \[loss\]\)"):
            loss.backward()


def double_there(x):
    return rpc.rpc_sync("worker1", torch.mul, (x, 2))


def test_a_reentrant_checkpoint_around_a_remote_call_raises_an_error_with_advice():
    with dist_autograd.context() as context_id:
        loss = checkpoint(double_there, leaf(), use_reentrant=True).sum()
        with pytest.raises(RuntimeError, match=r"use_reentrant=False\) around remote calls"):
            dist_autograd.backward(context_id, [loss])
