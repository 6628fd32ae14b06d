"""The optimizers of the C++ core against those of torch.optim: 100 steps of the same gradients."""

import pytest
import torch

from torchrpc import _C

CASES = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    ("SGD", {"lr": 0.01, "momentum": 0.9}),
    ("SGD", {"lr": 0.01, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    ("Adam", {}),
    ("Adam", {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "maximize": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("AdamW", {}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    ("Adagrad", {}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2}),
    ("Adagrad", {"lr": 0.1, "eps": 1e-6, "maximize": True}),
    ("RMSprop", {}),
    ("RMSprop", {"lr": 1e-3, "alpha": 0.9, "eps": 1e-6, "momentum": 0.9, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 1e-3, "centered": True, "momentum": 0.5, "maximize": True}),
    ("RMSprop", {"lr": 1e-3, "centered": True}),
    ("Adadelta", {}),
    ("Adadelta", {"lr": 0.5, "rho": 0.95, "eps": 1e-5, "weight_decay": 0.1}),
    ("Adadelta", {"maximize": True}),
    ("Adamax", {}),
    ("Adamax", {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}),
    ("Adamax", {"maximize": True, "weight_decay": 0.1}),
    ("Rprop", {}),
    ("Rprop", {"lr": 0.05, "etas": (0.3, 1.5), "step_sizes": (1e-4, 1)}),
    ("Rprop", {"maximize": True}),
]
FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
SHAPES = [(3, 4), (17,), (), (5, 1, 2), (0, 3), (40, 30)]
SEED = 4


def case_name(case):
    return case[0] + "".join(f"-{name}" for name in case[1]) if isinstance(case, tuple) else str(case)


def pair(dtype=torch.float32, shapes=SHAPES):
    """Return the same parameters twice."""
    torch.manual_seed(SEED)
    params = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    return params, [p.detach().clone().requires_grad_() for p in params]


def random_grads(params, step):
    """Some parameters have no gradient in the first steps, or in some steps."""
    return [None if i == 1 and step % 3 == 0 else torch.randn_like(p) for i, p in enumerate(params)]


def sparse_tensor(indices, values, size):
    return torch.sparse_coo_tensor(indices, values, size, check_invariants=True)


def step_both(theirs, ours, params, grads):
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()
    theirs.step()
    ours.step(grads)


def state_of(optimizer, params):
    return [{name: value for name, value in optimizer.state[p].items() if value is not None} for p in params]


def compare(actual, expected, exact):
    options = {"rtol": 0, "atol": 0} if exact else {}
    torch.testing.assert_close(actual, expected, msg=lambda text: f"seed {SEED}: {text}", **options)


@pytest.mark.parametrize(
    ("case", "fused"), [(c, None) for c in CASES] + [(c, False) for c in CASES if c[0] in FUSED], ids=case_name
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_a_hundred_steps_are_those_of_torch(case, fused, dtype):
    name, options = case
    params, copies = pair(dtype)
    theirs = getattr(torch.optim, name)(params, **options)
    ours = _C._LocalOptimizer(name, [(copies, {**options, "fused": fused} if name in FUSED else options)])
    for step in range(10 if dtype == torch.bfloat16 else 100):
        step_both(theirs, ours, params, random_grads(params, step))
    if dtype == torch.bfloat16:
        # torch's two implementations differ, too: Python rounds scalars later than _foreach_ kernels do.
        torch.testing.assert_close(copies, params, rtol=0.02, atol=0.05)
        return
    # Without a fused kernel the operations on real numbers are the same.
    exact = not dtype.is_complex and (fused is False or name not in FUSED)
    compare(copies, params, exact)
    if name != "SGD" or options.get("momentum"):
        compare(ours.state(), state_of(theirs, params), exact)


@pytest.mark.parametrize("name", sorted(FUSED))
def test_fused_optimizers_accept_half_precision(name):
    params, copies = pair(torch.bfloat16)
    theirs = getattr(torch.optim, name)(params, lr=0.1, fused=True)
    ours = _C._LocalOptimizer(name, [(copies, {"lr": 0.1, "fused": True})])
    for step in range(10):
        step_both(theirs, ours, params, random_grads(params, step))
    compare(copies, params, exact=True)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "Rprop"])
def test_strides_of_a_gradient_do_not_matter(name):
    options = {"lr": 0.1, **({"momentum": 0.9} if name == "SGD" else {})}
    params, copies = pair(shapes=[(4, 6), (2, 3, 4, 5)])
    with torch.no_grad():
        params[1].data = params[1].to(memory_format=torch.channels_last)
        copies[1].data = copies[1].to(memory_format=torch.channels_last)
    theirs = getattr(torch.optim, name)(params, **options)
    ours = _C._LocalOptimizer(name, [(copies, options)])
    for step in range(10):
        transposed = torch.randn(6, 4).t() if step % 2 == 0 else torch.randn(4, 6)
        step_both(theirs, ours, params, [transposed, torch.randn(2, 3, 4, 5)])
    compare(copies, params, exact=False)


@pytest.mark.parametrize(
    "case",
    [
        ("SGD", {"lr": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
        ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
        ("Adagrad", {"maximize": True}),
    ],
    ids=case_name,
)
def test_sparse_gradients_are_accepted_where_torch_accepts_them(case):
    name, options = case
    params, copies = pair(shapes=[(10, 3), (4,)])
    theirs = getattr(torch.optim, name)(params, **options)
    ours = _C._LocalOptimizer(name, [(copies, options)])
    for _ in range(100):
        indices = torch.randint(10, (1, 4))  # not coalesced
        sparse = sparse_tensor(indices, torch.randn(4, 3), (10, 3))
        step_both(theirs, ours, params, [sparse, torch.randn(4)])
    compare(copies, params, exact=False)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Adadelta", "Adamax", "Rprop"])
def test_sparse_gradients_are_refused_where_torch_refuses_them(name):
    (param,), (copy,) = pair(shapes=[(3,)])
    sparse = sparse_tensor([[0]], [1.0], (3,))
    param.grad = sparse
    with pytest.raises(RuntimeError) as expected:
        getattr(torch.optim, name)([param]).step()
    with pytest.raises(RuntimeError) as refused:
        _C._LocalOptimizer(name, [([copy], {})]).step([sparse])
    if name != "AdamW":  # torch's text has Adam, the base class
        assert str(refused.value) == str(expected.value)
    compare(copy, param, exact=True)


def test_adagrad_refuses_sparse_gradients_with_weight_decay():
    optimizer = _C._LocalOptimizer("Adagrad", [([torch.zeros(3)], {"weight_decay": 0.1})])
    with pytest.raises(RuntimeError, match="weight_decay option is not compatible with sparse gradients"):
        optimizer.step([sparse_tensor([[0]], [1.0], (3,))])


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_state_moves_to_torch_and_back(case):
    name, options = case
    params, copies = pair()
    theirs = getattr(torch.optim, name)(params, **options)
    ours = _C._LocalOptimizer(name, [(copies, options)])
    for step in range(3):
        step_both(theirs, ours, params, random_grads(params, step))
    # From torch's optimizer into a new one of the core, and from the core's into a new one of torch.
    new_ours = _C._LocalOptimizer(name, [(copies, options)])
    new_ours.load(state_of(theirs, params))
    new_theirs = getattr(torch.optim, name)(params, **options)
    states = {i: state for i, state in enumerate(ours.state()) if state}
    new_theirs.load_state_dict({"state": states, "param_groups": theirs.state_dict()["param_groups"]})
    for step in range(3):
        step_both(new_theirs, new_ours, params, random_grads(params, step))
    compare(copies, params, exact=False)


def test_state_is_a_copy_and_is_copied():
    param = torch.zeros(2)
    optimizer = _C._LocalOptimizer("SGD", [([param], {"momentum": 0.9})])
    optimizer.step([torch.ones(2)])
    (state,) = optimizer.state()
    state["momentum_buffer"].zero_()
    assert torch.equal(optimizer.state()[0]["momentum_buffer"], torch.ones(2))
    optimizer.load([state])
    state["momentum_buffer"].fill_(5)
    assert torch.equal(optimizer.state()[0]["momentum_buffer"], torch.zeros(2))
    optimizer.load([{"momentum_buffer": torch.ones(2, dtype=torch.float64)}])
    assert optimizer.state()[0]["momentum_buffer"].dtype == torch.float32


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ([{}, {}], "there are 1 parameters, but states of 2"),
        ([{"exp_avg": torch.zeros(2)}], "SGD keeps no 'exp_avg'"),
        ([{"momentum_buffer": torch.zeros(3)}], "must be a tensor of size"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_whole(states, text):
    optimizer = _C._LocalOptimizer("SGD", [([torch.zeros(2)], {"momentum": 0.9})])
    optimizer.step([torch.ones(2)])
    with pytest.raises(RuntimeError, match=text):
        optimizer.load(states)
    assert torch.equal(optimizer.state()[0]["momentum_buffer"], torch.ones(2))


def test_parameter_groups_have_their_own_options_which_can_change():
    one, two = torch.zeros(1), torch.zeros(1)
    optimizer = _C._LocalOptimizer("SGD", [([one], {"lr": 1.0}), ([two], {"lr": 0.1})])
    optimizer.step([torch.ones(1), torch.ones(1)])
    assert (one.item(), two.item()) == (-1.0, pytest.approx(-0.1))
    optimizer.set_options([{"lr": 2.0}, {"momentum": 0.5}])
    optimizer.step([torch.ones(1), torch.ones(1)])
    assert (one.item(), two.item()) == (-3.0, pytest.approx(-0.2))
    with pytest.raises(RuntimeError, match="there are 2 groups of parameters, but options of 1"):
        optimizer.set_options([{}])
    with pytest.raises(RuntimeError, match="'lr' must be a number"):
        optimizer.set_options([{"lr": None}, {}])


@pytest.mark.parametrize(
    "case",
    [
        ("SGD", {"lr": -1.5}),
        ("SGD", {"momentum": -1.5}),
        ("SGD", {"weight_decay": -1.5}),
        ("SGD", {"nesterov": True}),
        ("Adam", {"lr": -1.5}),
        ("Adam", {"eps": -1.5}),
        ("Adam", {"betas": (1.5, 0.5)}),
        ("Adam", {"betas": (0.5, 1.5)}),
        ("Adagrad", {"lr_decay": -1.5}),
        ("Adagrad", {"initial_accumulator_value": -1.5}),
        ("RMSprop", {"alpha": -1.5}),
        ("Adadelta", {"rho": 1.5}),
        ("Adamax", {"betas": (0.5, 1.5)}),
        ("Rprop", {"lr": -1.5}),
    ],
    ids=case_name,
)
def test_options_out_of_range_are_refused_with_torchs_text(case):
    name, options = case
    with pytest.raises(ValueError) as expected:
        getattr(torch.optim, name)([torch.zeros(1)], **options)
    with pytest.raises(RuntimeError) as refused:
        _C._LocalOptimizer(name, [([torch.zeros(1)], options)])
    assert str(refused.value) == str(expected.value)


def test_parameters_that_cannot_be_optimized_are_refused():
    def refusal(groups, kind="SGD"):
        with pytest.raises(RuntimeError) as refused:
            _C._LocalOptimizer(kind, groups)
        return str(refused.value)

    param = torch.zeros(1, requires_grad=True)
    assert "can't optimize a non-leaf Tensor: parameter 1" in refusal([([param, param * 2], {})])
    assert "parameter 1 is the same tensor as one before it" in refusal([([param], {}), ([param], {})])
    assert "empty parameter list" in refusal([])
    assert "no option 'speed'" in refusal([([param], {"speed": 1})])
    assert "no optimizer named 'LBFGS'" in refusal([([param], {})], "LBFGS")


def test_a_gradient_that_does_not_fit_changes_nothing():
    one, two = torch.zeros(2), torch.zeros(2)
    optimizer = _C._LocalOptimizer("SGD", [([one, two], {})])
    for grads, text in [
        ([torch.ones(2)], "but 1 gradients"),
        ([torch.ones(2), torch.ones(3)], "gradient of parameter 1"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            optimizer.step(grads)
    assert one.eq(0).all() and two.eq(0).all()


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_a_step_is_noticed_by_graphs_unless_lock_free(case):
    name, options = case
    for lock_free in (False, True):
        param = torch.ones(3, requires_grad=True)
        optimizer = _C._LocalOptimizer(name, [([param], options)], lock_free=lock_free)
        loss = (param * param).sum()
        for _ in range(2):  # the first step of Rprop and of momentum may differ
            optimizer.step([torch.ones(3)])
        assert not param.eq(1).any()
        if lock_free:
            loss.backward()
            # Part of the gradient uses newer values, since the memory of the parameter is shared.
            assert torch.equal(param.grad, 2 * param.detach())
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_replaced_parameter_memory_is_used():
    param = torch.zeros(2, requires_grad=True)
    optimizer = _C._LocalOptimizer("SGD", [([param], {"lr": 1.0})], lock_free=True)
    param.data = torch.full((2,), 5.0)
    optimizer.step([torch.ones(2)])
    assert torch.equal(param.detach(), torch.full((2,), 4.0))
