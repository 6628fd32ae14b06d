"""Distributed passes treat a part of the graph as local passes do, on the worker with the roots and on other workers.

A stage is a part of a computation with hooks, custom functions or other features of autograd. It runs in one process
with torch's own autograd, then in a distributed pass, on this worker ("here") or on another one ("there"). The
gradients and the notes of the stage must be equal.
"""

import pytest
import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import torchrpc.autograd as dist_autograd
import torchrpc.rpc as rpc
from torchrpc.testing import workers

SHAPE = (4, 3)


@pytest.fixture(scope="module", autouse=True)
def group():
    with workers(3):
        yield


# --- stages, and how they are run ---


class Here:
    """The data of a stage on its worker: leaves, notes, a function that calls another worker."""

    def __init__(self, call):
        self.weight = leaf(1)
        self.bias = leaf(2)
        self.notes = []
        self.call = call

    def note(self, *what):
        """Record values, or functions that return them after the pass."""
        self.notes.append(what)

    def noting(self, name, change=lambda gradient: None):
        """Return a hook that records the gradient and changes it."""

        def hook(gradient):
            self.note(name, None if gradient is None else gradient.clone())
            return change(gradient)

        return hook


def leaf(seed):
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


here = None


def begin(distributed):
    global here
    here = Here((lambda function, *args: rpc.rpc_sync("worker2", function, args)) if distributed else plain_call)
    if distributed:  # distributed passes do not change .grad
        for tensor in (here.weight, here.bias):
            tensor.grad = torch.full(SHAPE, 7.0, dtype=torch.float64)


def plain_call(function, *args):
    return function(*args)


def run_stage(stage, x):
    return stage(here, x)


def plain(value):
    """Return a value that can be compared."""
    if callable(value):
        value = value()
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        return str(value.layout), str(value.dtype), value.to_dense().tolist()
    return value


def check_same(actual, wanted):
    """Numbers may differ by rounding, since the order of a sum may differ."""
    if isinstance(wanted, (list, tuple)):
        assert type(actual) is type(wanted) and len(actual) == len(wanted), (actual, wanted)
        for ours, theirs in zip(actual, wanted, strict=True):
            check_same(ours, theirs)
    else:
        assert actual == (pytest.approx(wanted, rel=1e-9, abs=1e-12) if isinstance(wanted, float) else wanted)


def outcome(context_id):
    gradients = dist_autograd.get_gradients(context_id)
    for tensor in (here.weight, here.bias):
        assert torch.equal(tensor.grad, torch.full(SHAPE, 7.0, dtype=torch.float64))
    return [plain(gradients.get(tensor)) for tensor in (here.weight, here.bias)], plain(here.notes)


def run_locally(stage, passes=1):
    begin(distributed=False)
    x = leaf(0)
    loss = run_stage(stage, x * 2).sum()
    for remaining in reversed(range(passes)):
        torch.autograd.backward([loss], retain_graph=remaining > 0)
    return plain(x.grad), ([plain(here.weight.grad), plain(here.bias.grad)], plain(here.notes))


def run_distributed(stage, location, mode="smart", passes=1):
    at = {"here": "worker0", "there": "worker1"}[location]
    rpc.rpc_sync(at, begin, (True,))
    x = leaf(0)
    with dist_autograd.context() as context_id:
        received = rpc.rpc_sync("worker1", torch.mul, (x, 2))
        output = run_stage(stage, received) if location == "here" else rpc.rpc_sync(at, run_stage, (stage, received))
        loss = rpc.rpc_sync("worker1", torch.sum, (output,))
        for remaining in reversed(range(passes)):
            dist_autograd.backward(context_id, [loss], retain_graph=remaining > 0, mode=mode)
        gradient = dist_autograd.get_gradients(context_id).get(x)
        return plain(gradient), rpc.rpc_sync(at, outcome, (context_id,))


# --- hooks ---


def hooks_of_tensors(here, x):
    """They change gradients, in the order of their registration; one is removed."""
    x.register_hook(here.noting("x", lambda gradient: gradient * 3))
    x.register_hook(here.noting("x again"))
    here.weight.register_hook(here.noting("weight", torch.neg))
    middle = x * here.weight
    middle.register_hook(here.noting("off")).remove()
    middle.register_hook(here.noting("middle", lambda gradient: gradient + 1))
    return middle.tanh()


def hooks_of_nodes(here, x):
    middle = (x * here.weight).sin()
    output = middle * here.bias
    output.grad_fn.register_prehook(lambda outputs: here.note("before", outputs) or tuple(g * 2 for g in outputs))
    output.grad_fn.register_hook(lambda inputs, outputs: here.note("after", inputs, outputs))
    middle.grad_fn.register_hook(lambda inputs, outputs: tuple(g + 1 for g in inputs))
    return output


def accumulator(leaf):
    return leaf.expand_as(leaf).grad_fn.next_functions[0][0]


def hooks_of_accumulation_nodes(here, x):
    node = accumulator(here.weight)
    node.register_prehook(lambda gradients: here.note("before", gradients) or (gradients[0] * 2,))
    node.register_hook(lambda inputs, outputs: here.note("after", outputs, here.weight.grad))
    here.node = node
    return x * here.weight + here.bias


def hooks_after_accumulation(here, x):
    def scale(leaf):
        here.note("weight", leaf.grad.clone())
        leaf.grad *= 10

    here.weight.register_post_accumulate_grad_hook(scale)
    here.weight.register_post_accumulate_grad_hook(lambda leaf: here.note("again", leaf.grad.clone()))
    return x * here.weight + x * here.bias


def hooks_after_accumulation_that_take_the_gradient(here, x):
    def take(leaf):
        here.note("taken", leaf.grad)
        leaf.grad = None

    here.weight.register_post_accumulate_grad_hook(take)
    return x * here.weight + here.bias


def hooks_for_several_tensors(here, x):
    def seen(gradients):
        here.note("all", list(gradients))

    torch.autograd.graph.register_multi_grad_hook([here.weight, here.bias, x], seen)
    torch.autograd.graph.register_multi_grad_hook([x, here.bias], here.noting("any"), mode="any")
    return (x + here.bias) * here.weight


def hooks_of_branches(here, x):
    """The hooks of the latest result run first."""
    branches = [torch.sin(x + i * here.weight) for i in range(4)]
    for i in (2, 0, 3, 1):
        branches[i].register_hook(here.noting(f"branch {i}"))
    return (branches[1] * branches[3]) / (2 + branches[0] * branches[2])


def callbacks_at_the_end(here, x):
    def hook(_):
        torch.autograd.Variable._execution_engine.queue_callback(lambda: here.note("end"))

    x.register_hook(hook)
    here.weight.register_hook(here.noting("weight"))
    return x * here.weight


def questions_about_the_pass(here, x):
    middle = x * here.weight
    nodes = middle.grad_fn, (x * here.bias).grad_fn

    def hook(_):
        taking_part = [torch._C._will_engine_execute_node(node) for node in nodes]
        here.note(taking_part, torch._C._autograd._get_current_graph_task_keep_graph())

    middle.register_hook(hook)
    return middle


def retained_gradients(here, x):
    middle = (x * here.weight).tanh()
    middle.retain_grad()
    x.retain_grad()
    x.register_hook(lambda gradient: gradient * 2)
    here.note("retained", lambda: middle.grad, lambda: x.grad)
    return middle * here.bias


def hooks_of_saved_tensors(here, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach() + 1, lambda t: here.note("used", t) or t - 1):
        return (x * here.weight).exp() * here.bias


# --- custom functions ---


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, notes, materialize):
        ctx.save_for_backward(x, weight)
        ctx.notes = notes
        ctx.set_materialize_grads(materialize)
        return x * weight, x + weight

    @staticmethod
    @once_differentiable
    def backward(ctx, product, total):
        x, weight = ctx.saved_tensors
        ctx.notes.append(("backward", product, total, ctx.needs_input_grad))
        return product * weight, product * x, None, None


def functions_with_an_unused_output(here, x):
    return TwoOutputs.apply(x, here.weight, here.notes, True)[0] * here.bias


def functions_that_see_undefined_gradients(here, x):
    return TwoOutputs.apply(x, here.weight, here.notes, False)[0] * here.bias


class Careless(torch.autograd.Function):
    """Returns gradients of another dtype, and of a shape that must be summed."""

    @staticmethod
    def forward(ctx, x, weight):
        return x + weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient.float(), gradient.expand(2, *SHAPE)


def functions_with_careless_gradients(here, x):
    return Careless.apply(x, here.weight) * here.bias


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x + weight

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient


def functions_without_a_gradient(here, x):
    """The earlier part of the graph gets an undefined gradient and propagates it."""
    before = (x * 2).tanh()
    here.bias.register_hook(here.noting("bias"))
    return NoGradient.apply(before + here.bias, here.weight)


class BackwardWithin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, inner):
        ctx.save_for_backward(x, inner)
        return x * inner

    @staticmethod
    def backward(ctx, gradient):
        x, inner = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            (x * inner).backward(gradient)
            (other,) = torch.autograd.grad((x * inner).sum(), x)
        return x.grad, inner.grad * other


def passes_within_passes(here, x):
    return BackwardWithin.apply(BackwardWithin.apply(x, here.weight), here.bias)


def block(x, weight):
    return (x * weight).sin() * weight


def checkpoints(here, x):
    return checkpoint(block, checkpoint(block, x, here.weight, use_reentrant=False), here.bias, use_reentrant=False)


def reentrant_checkpoints(here, x):
    return checkpoint(block, checkpoint(block, x, here.bias, use_reentrant=True), here.weight, use_reentrant=True)


def block_elsewhere(call, x, weight):
    return call(block, x, weight) * weight


def checkpoints_around_remote_calls(here, x):
    return checkpoint(block_elsewhere, here.call, x, here.weight, use_reentrant=False)


# --- views, in-location operations, unusual gradients ---


def views_changed_in_place(here, x):
    base = x * 1
    rows = base[1:]
    rows.t().mul_(here.weight[1:].t())
    first, second = base.view(2, 2, 3).chunk(2)
    return torch.cat((first * here.bias[:2], second.sin())).view(SHAPE) + base


def partly_used_results(here, x):
    first, _, third, _ = x.unbind()
    _, used = here.weight.split((1, 3))
    return torch.stack((first * used[0], third)) @ here.bias.t()


def gradients_that_share_memory(here, x):
    """Both leaves and x get one tensor; a second pass adds to each of them once."""
    return x + here.weight + here.bias


def sparse_gradients(here, x):
    rows = torch.nn.functional.embedding(torch.tensor([1, 3, 1]), here.weight, sparse=True)
    received_rows = torch.nn.functional.embedding(torch.tensor([0, 3]), x, sparse=True)
    return rows.sum(0) * here.bias + received_rows.sum()


def sparse_and_dense_gradients(here, x):
    rows = torch.nn.functional.embedding(torch.tensor([2, 2]), here.weight, sparse=True)
    return rows.sum(0) * here.weight + x * here.bias


STAGES = [
    callbacks_at_the_end,
    checkpoints,
    checkpoints_around_remote_calls,
    functions_that_see_undefined_gradients,
    functions_with_an_unused_output,
    functions_with_careless_gradients,
    functions_without_a_gradient,
    gradients_that_share_memory,
    hooks_after_accumulation,
    hooks_after_accumulation_that_take_the_gradient,
    hooks_for_several_tensors,
    hooks_of_accumulation_nodes,
    hooks_of_branches,
    hooks_of_nodes,
    hooks_of_saved_tensors,
    hooks_of_tensors,
    partly_used_results,
    passes_within_passes,
    questions_about_the_pass,
    reentrant_checkpoints,
    retained_gradients,
    sparse_and_dense_gradients,
    sparse_gradients,
    views_changed_in_place,
]


@pytest.mark.parametrize("location", ["here", "there"])
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_a_part_of_a_distributed_pass_behaves_like_a_local_pass(stage, location):
    check_same(run_distributed(stage, location, "smart"), run_locally(stage))
    if stage is not checkpoints_around_remote_calls:  # the recomputed calls belong to no pass, and "fast" waits for all
        check_same(run_distributed(stage, location, "fast"), run_locally(stage))


@pytest.mark.parametrize("location", ["here", "there"])
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_gradients_of_several_passes_add_up_as_in_local_ones(stage, location):
    check_same(run_distributed(stage, location, passes=3), run_locally(stage, passes=3))
