"""DistributedOptimizer over real workers: as local training, with schedulers, state, several trainers, errors."""

import gc
import io

import pytest
import torch
from torch.optim import lr_scheduler
from waiting import eventually

import torchrpc.autograd as dist_autograd
import torchrpc.rpc as rpc
from torchrpc import optim as torchrpc_optim
from torchrpc.optim import DistributedOptimizer
from torchrpc.testing import workers

OWNERS = ["worker1", "worker2", "worker0", "worker1"]  # the owners of a model's layers; worker0 is this process


@pytest.fixture(scope="module", autouse=True)
def group():
    with workers(3) as names:
        yield names


class Plain(torch.optim.SGD):
    """Runs in Python: only SGD itself, not a subclass, runs in C++."""


class Failing(torch.optim.Optimizer):
    def __init__(self, params, when):
        super().__init__(params, {})
        self.when = when
        if when == "constructor":
            raise ValueError("Error creating optimizer.")

    def step(self, closure=None):
        raise ValueError("Error running optimizer.")


def make_weight(seed):
    return torch.nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)))


def apply_layer(weight, x):
    return torch.tanh(weight.local_value() @ x)


def square(weight):
    value = weight.local_value()
    return (value * value).sum()


def make_double(weight):
    return weight.local_value() * 2


def make_group_options():
    return {"params": [torch.zeros(1)]}


def debug_info():
    gc.collect()
    return {key: int(value) for key, value in rpc._rref_context_get_debug_info().items()}


def weights():
    """Return a model's layers twice: as RRefs on several workers, and as local parameters."""
    remote = [rpc.remote(owner, make_weight, (seed,)) for seed, owner in enumerate(OWNERS)]
    return remote, [make_weight(seed) for seed in range(len(OWNERS))]


def inputs(step):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(step))


def used(step):
    """Return the indices of the layers of a step. The second layer is not in every step, and has no gradient then."""
    return [i for i in range(len(OWNERS)) if i != 1 or step % 3]


def remote_step(optimizer, remote, step):
    with dist_autograd.context() as context_id:
        x = inputs(step)
        for i in used(step):
            x = rpc.rpc_sync(OWNERS[i], apply_layer, (remote[i], x))
        dist_autograd.backward(context_id, [x.square().sum()])
        optimizer.step(context_id)


def local_step(optimizer, local, step):
    optimizer.zero_grad()
    x = inputs(step)
    for i in used(step):
        x = torch.tanh(local[i] @ x)
    x.square().sum().backward()
    optimizer.step()


def assert_same(remote, local):
    torch.testing.assert_close([rref.to_here().detach() for rref in remote], [p.detach() for p in local])


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.Adagrad, {"lr": 0.05}),
        (torch.optim.RMSprop, {"lr": 0.001, "momentum": 0.9, "centered": True}),
        (torch.optim.Adadelta, {"rho": 0.95}),
        (torch.optim.Adamax, {"lr": 0.01}),
        (torch.optim.Rprop, {"lr": 0.01}),
        (torch.optim.NAdam, {"lr": 0.01}),
        (Plain, {"lr": 0.05, "momentum": 0.9}),
    ],
)
def test_a_hundred_steps_are_those_of_local_training(cls, options):
    remote, local = weights()
    distributed, optimizer = DistributedOptimizer(cls, remote, **options), cls(local, **options)
    assert distributed.is_functional_optim is (cls not in (torch.optim.NAdam, Plain))
    for step in range(100):
        remote_step(distributed, remote, step)
        local_step(optimizer, local, step)
    assert_same(remote, local)


@pytest.mark.parametrize("cls", [torch.optim.SGD, Plain])
def test_parameter_groups_have_their_own_options(cls):
    remote, local = weights()

    def groups(params):
        return [{"params": params[:1], "lr": 0.5}, {"params": params[1:3]}, {"params": params[3], "momentum": 0.9}]

    distributed, optimizer = DistributedOptimizer(cls, groups(remote), 0.1), cls(groups(local), 0.1)
    assert [group["lr"] for group in distributed.param_groups] == [0.5, 0.1, 0.1]
    assert [group["momentum"] for group in distributed.param_groups] == [0, 0, 0.9]
    for step in range(5):
        remote_step(distributed, remote, step)
        local_step(optimizer, local, step)
    assert_same(remote, local)


SCHEDULERS = [
    lambda optimizer: lr_scheduler.StepLR(optimizer, 3),
    lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20),
    lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.5, step_size_up=4),
    lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 10)], [5]
    ),
]


@pytest.mark.parametrize("make_scheduler", SCHEDULERS)
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam, Plain])
def test_schedulers_drive_it(cls, make_scheduler):
    remote, local = weights()
    options = {"lr": 0.1} if cls is torch.optim.Adam else {"lr": 0.1, "momentum": 0.9}
    distributed, optimizer = DistributedOptimizer(cls, remote, **options), cls(local, **options)
    schedulers = make_scheduler(distributed), make_scheduler(optimizer)
    for step in range(15):
        remote_step(distributed, remote, step)
        local_step(optimizer, local, step)
        for scheduler in schedulers:
            scheduler.step()
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
    assert_same(remote, local)


@pytest.mark.parametrize("cls", [torch.optim.SGD, Plain])
def test_a_rate_in_a_tensor_can_be_changed_in_place(cls):
    rref = rpc.remote("worker1", make_weight, (0,))
    optimizer = DistributedOptimizer(cls, [rref], lr=torch.tensor(1.0))
    before = rref.to_here()
    optimizer.param_groups[0]["lr"].fill_(0.25)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", square, (rref,))])
        optimizer.step(context_id)
    torch.testing.assert_close(rref.to_here(), before / 2)


@pytest.mark.parametrize(
    ("cls", "options"),
    [(torch.optim.Adam, {"lr": 0.05}), (torch.optim.NAdam, {}), (Plain, {"lr": 0.1, "momentum": 0.9})],
)
def test_state_is_saved_and_restored_here_and_in_torch(cls, options):
    remote, local = weights()
    distributed, optimizer = DistributedOptimizer(cls, remote, **options), cls(local, **options)
    for step in range(4):
        remote_step(distributed, remote, step)
        local_step(optimizer, local, step)
    file = io.BytesIO()
    torch.save(distributed.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    expected = optimizer.state_dict()
    torch.testing.assert_close(saved["state"], expected["state"])
    assert [group["params"] for group in saved["param_groups"]] == [[0, 1, 2, 3]]
    assert saved["param_groups"][0]["lr"] == expected["param_groups"][0]["lr"]
    # A new distributed optimizer loads the state of the local one, and the reverse.
    distributed, optimizer = DistributedOptimizer(cls, remote), cls(local)
    distributed.load_state_dict(expected)
    optimizer.load_state_dict(saved)
    assert distributed.param_groups[0]["lr"] == expected["param_groups"][0]["lr"]
    for step in range(4, 8):
        remote_step(distributed, remote, step)
        local_step(optimizer, local, step)
    assert_same(remote, local)


@pytest.mark.parametrize("cls", [torch.optim.SGD, Plain])
def test_a_state_of_other_groups_is_refused(cls):
    remote, local = weights()
    optimizer = DistributedOptimizer(cls, remote)
    with pytest.raises(ValueError, match="parameter group that doesn't match the size"):
        optimizer.load_state_dict(cls(local[:2]).state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(cls([{"params": p} for p in local]).state_dict())


def test_a_state_that_does_not_fit_is_refused_by_its_owner():
    remote, _ = weights()
    optimizer = DistributedOptimizer(torch.optim.SGD, remote, momentum=0.9)
    state = optimizer.state_dict()
    state["state"][1] = {"momentum_buffer": torch.zeros(3)}
    with pytest.raises(RuntimeError, match="loading of the optimizer on worker2: 'momentum_buffer'"):
        optimizer.load_state_dict(state)


def test_hooks_of_torch_are_called():
    remote, _ = weights()
    optimizer = DistributedOptimizer(torch.optim.SGD, remote)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(state["extra"]))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    remote_step(optimizer, remote, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "after", 1, "loaded"]


@pytest.mark.parametrize("cls", [torch.optim.SGD, Plain])
def test_owners_that_a_context_has_never_reached_do_nothing(cls):
    remote, _ = weights()
    optimizer = DistributedOptimizer(cls, remote, lr=1.0)
    before = [rref.to_here() for rref in remote]
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", square, (remote[0],))
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    after = [rref.to_here() for rref in remote]
    torch.testing.assert_close(after, [-before[0], *before[1:]])


@pytest.mark.parametrize("cls", [torch.optim.SGD, Plain])
def test_an_unknown_context_is_named(cls):
    optimizer = DistributedOptimizer(cls, weights()[0])
    with pytest.raises(RuntimeError, match="Could not find autograd context with id: 12345"):
        optimizer.step(12345)


@pytest.mark.parametrize("cls", [torch.optim.SGD, Plain])
def test_an_existing_grad_is_neither_used_nor_lost(cls):
    weight = make_weight(0)
    weight.grad = torch.ones(4, 4)
    rref = rpc.RRef(weight)
    optimizer = DistributedOptimizer(cls, [rref, rpc.RRef(other := make_weight(1))], lr=0.5)
    other.grad = torch.ones(4, 4)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [square(rref)])
        optimizer.step(context_id)
    torch.testing.assert_close(weight.detach(), torch.zeros(4, 4))
    assert weight.grad.eq(1).all() and torch.equal(other, make_weight(1))


@pytest.mark.parametrize("cls", [torch.optim.SGD, Plain])
def test_a_step_between_forward_and_backward_fails_unless_lock_free(cls):
    rref = rpc.remote("worker1", make_weight, (0,))
    first = rref.to_here()
    for lock_free in (False, True):
        optimizer = DistributedOptimizer(cls, [rref], lr=1.0, lock_free=lock_free)
        with dist_autograd.context() as context_id:
            slow = rpc.rpc_sync("worker1", square, (rref,))
            dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", square, (rref,))])
            optimizer.step(context_id)
            if lock_free:
                dist_autograd.backward(context_id, [slow])
            else:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    dist_autograd.backward(context_id, [slow])
    # Each step maps w to -w, so two steps restore it.
    torch.testing.assert_close(rref.to_here(), first)


def test_optimizers_are_released_with_the_last_reference():
    eventually(lambda: gc.collect() is not None and rpc.rpc_sync("worker1", debug_info)["num_owner_rrefs"] == 0)
    rref = rpc.remote("worker1", make_weight, (0,))
    optimizer = DistributedOptimizer(torch.optim.SGD, [rref])
    assert rpc.rpc_sync("worker1", debug_info)["num_owner_rrefs"] == 2
    remote = optimizer.remote_optimizers
    assert [r.owner_name() for r in remote] == ["worker1"]
    del optimizer
    gc.collect()
    assert rpc.rpc_sync("worker1", debug_info)["num_owner_rrefs"] == 2
    del remote
    eventually(lambda: gc.collect() is not None and rpc.rpc_sync("worker1", debug_info)["num_owner_rrefs"] == 1)
    assert rref.to_here().shape == (4, 4)


def test_an_optimizer_cannot_be_fetched():
    optimizer = DistributedOptimizer(torch.optim.SGD, weights()[0][:2])
    for rref in optimizer.remote_optimizers:
        with pytest.raises(RuntimeError, match="stays where it is"):
            rref.to_here()


@pytest.mark.parametrize("cls", [torch.optim.SGD, Plain])
def test_parameters_that_cannot_be_optimized_are_refused(cls):
    weight = rpc.remote("worker1", make_weight, (0,))
    with pytest.raises(ValueError, match="empty parameter list"):
        DistributedOptimizer(cls, [])
    with pytest.raises(ValueError, match="empty parameter list"):
        DistributedOptimizer(cls, [{"params": []}])
    with pytest.raises(ValueError, match="group 0 of params_rref has no 'params'"):
        DistributedOptimizer(cls, [{"lr": 1}])
    with pytest.raises(TypeError, match=r"one of the params is a Parameter: wrap"):
        DistributedOptimizer(cls, [make_weight(0)])
    with pytest.raises(TypeError, match="must be a list of RRefs"):
        DistributedOptimizer(cls, weight)
    with pytest.raises((TypeError, RuntimeError), match="optimizer can only optimize Tensors"):
        DistributedOptimizer(cls, [rpc.remote("worker1", make_group_options)])
    with pytest.raises((ValueError, RuntimeError), match="can't optimize a non-leaf Tensor"):
        DistributedOptimizer(cls, [rpc.remote("worker1", make_double, (weight,))])
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        DistributedOptimizer(cls, [weight], lr=-1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        DistributedOptimizer(cls, [weight], speed=1)
    with pytest.raises(RuntimeError, match="all groups of parameters at once"):
        DistributedOptimizer(cls, [weight]).add_param_group({"params": [weight]})


def test_an_rref_that_failed_raises_its_error():
    with pytest.raises(Exception, match="invalid literal"):
        DistributedOptimizer(torch.optim.SGD, [rpc.remote("worker1", int, ("x",))])


def test_errors_of_the_optimizer_class_are_raised_at_the_client():
    remote, _ = weights()
    with pytest.raises(ValueError, match="Error creating optimizer"):
        DistributedOptimizer(Failing, remote, "constructor")
    optimizer = DistributedOptimizer(Failing, remote, when="step")
    with dist_autograd.context() as context_id, pytest.raises(ValueError, match="Error running optimizer"):
        optimizer.step(context_id)


def make_parameter():
    return torch.nn.Parameter(torch.ones(2))


def times_three(rref):
    return rref.local_value() * 3


def test_a_program_can_make_its_own_optimizer_of_the_parts_of_torchs():
    owners = ["worker1", "worker2"]
    parameters = [rpc.remote(owner, make_parameter) for owner in owners]
    optimizers = torchrpc_optim._wait_for_all(
        rpc.rpc_async(owner, torchrpc_optim._new_local_optimizer, (torch.optim.SGD, [parameter]), {"lr": 0.5})
        for owner, parameter in zip(owners, parameters, strict=True)
    )
    with dist_autograd.context() as context:
        products = [rpc.rpc_sync(each.owner(), times_three, (each,)) for each in parameters]
        dist_autograd.backward(context, [sum(products).sum()])
        torchrpc_optim._wait_for_all(
            rpc.rpc_async(each.owner(), torchrpc_optim._local_optimizer_step, (each, context)) for each in optimizers
        )
    assert [each.to_here().tolist() for each in parameters] == [[-0.5, -0.5]] * 2


def test_a_wait_for_all_raises_after_all_have_ended():
    failed, later = torch.futures.Future(), torch.futures.Future()
    failed.set_exception(ValueError("no"))
    later.set_result(1)
    with pytest.raises(ValueError, match="no"):
        torchrpc_optim._wait_for_all([failed, later])
    assert torchrpc_optim._wait_for_all([later]) == [1]


def test_importing_the_package_does_not_load_the_extension(run_python):
    run_python("-c", "import torchrpc.optim, sys; assert 'torchrpc._C' not in sys.modules")
    assert torchrpc_optim.__all__ == ["DistributedOptimizer"]
