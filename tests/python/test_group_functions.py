"""The package's own functions, which any worker may call: a worker speaks only for itself, and reaches only listed
classes by them.
"""

import threading

import pytest
import torch
from waiting import eventually

import torchrpc.rpc as rpc
from torchrpc import profiler
from torchrpc.nn import RemoteModule, remote_module
from torchrpc.optim import DistributedOptimizer, _parts
from torchrpc.rpc import NotAllowedError, _utils, api
from torchrpc.rpc._group import gather
from torchrpc.testing import free_port, run_ranks, workers

SPEAKS = "does not let worker0 speak for worker2: a worker speaks only for itself"


# --- Members ---


def expel(rank, url):
    options = rpc.TensorPipeRpcBackendOptions(init_method=url)
    rpc.init_rpc(f"worker{rank}", rank=rank, rpc_backend_options=options)
    barrier = f"{url}{rank}"
    agent = api._get_current_rpc_agent()
    store = agent.store
    store.add("there", 1)
    while store.add("there", 0) < 3:
        pass
    if rank == 0:
        others = [agent.get_worker_info(id) for id in (1, 2)]
        with pytest.raises(NotAllowedError, match="speak for the worker with id 2"):
            rpc.rpc_sync("worker1", _utils._update_group_membership, args=(others[1], [], {}, False))
        with pytest.raises(NotAllowedError, match="speak for the worker with id 7"):
            rpc.rpc_sync("worker1", _utils._update_group_membership, args=(rpc.WorkerInfo("x", 7), [], {}, True))
        # In its own name, but with that of another worker.
        for join in (False, True):
            with pytest.raises(rpc.RendezvousError, match=r"worker2"):
                args = (rpc.WorkerInfo("worker2", 0), [], {}, join)
                rpc.rpc_sync("worker1", _utils._update_group_membership, args=args)
        assert rpc.rpc_sync("worker1", ask, args=("worker2",)) == 2
    store.add("done", 1)
    while store.add("done", 0) < 3:
        pass
    rpc.shutdown()
    return barrier


def ask(worker):
    return rpc.rpc_sync(worker, rpc.get_worker_info).id


def test_a_worker_cannot_expel_or_add_another():
    run_ranks(expel, 3, f"tcp://127.0.0.1:{free_port()}", init=False)


def test_nobody_joins_or_leaves_a_group_of_a_fixed_size():
    with workers(2):
        me = rpc.get_worker_info()
        with pytest.raises(rpc.RendezvousError, match="fixed size"):
            rpc.rpc_sync("worker1", _utils._update_group_membership, args=(me, [], {}, False))


# --- Barriers ---


def begin_barrier(names):
    """Begin it on another thread; return at once."""
    global barrier
    barrier = threading.Thread(target=api._barrier, args=(names,))
    barrier.start()


def is_in_barrier():
    barrier.join(0.3)
    return barrier.is_alive()


def test_a_barrier_waits_for_its_workers_and_not_for_what_others_say_in_their_name():
    names = {"worker1", "worker2"}
    sequence_id = gather.digest_of(["worker1", "worker2"]) + "-0"
    with workers(3):
        rpc.rpc_sync("worker1", begin_barrier, args=(names,))
        with pytest.raises(NotAllowedError, match=SPEAKS):
            rpc.rpc_sync("worker1", api._gather_to_leader, args=(sequence_id, "worker2", None, names))
        with pytest.raises(AssertionError, match="worker0 is not expected by leader"):
            rpc.rpc_sync("worker1", api._gather_to_leader, args=(sequence_id, "worker0", None, {"worker0"}))
        with pytest.raises(NotAllowedError, match="worker0 does not lead a gathering"):
            rpc.rpc_sync("worker1", api._broadcast_to_followers, args=(sequence_id, dict.fromkeys(names)))
        assert rpc.rpc_sync("worker1", is_in_barrier)
        rpc.rpc_sync("worker2", begin_barrier, args=(names,))
        for name in names:
            eventually(lambda name=name: not rpc.rpc_sync(name, is_in_barrier))


def test_a_forged_report_before_a_barrier_does_not_end_it():
    names = {"worker1", "worker2"}
    with workers(3):
        rpc.rpc_sync("worker1", api._gather_to_leader, args=("worker1worker20", "worker0", None, {"worker0"}))
        with pytest.raises(NotAllowedError, match="worker0 does not lead a gathering"):
            rpc.rpc_sync("worker2", api._broadcast_to_followers, args=("worker1worker20", dict.fromkeys(names)))
        rpc.rpc_sync("worker1", begin_barrier, args=(names,))
        assert rpc.rpc_sync("worker1", is_in_barrier)
        rpc.rpc_sync("worker2", begin_barrier, args=(names,))
        eventually(lambda: not rpc.rpc_sync("worker1", is_in_barrier))


def gather_twice(rank):
    """Return what the leader sends, and what this worker gets, of a gathering of None and one of ranks."""
    sent = []
    original = api.rpc_async

    def recording(to, function, args=(), **kwargs):
        if function is api._broadcast_to_followers:
            sent.append(args[1])
        return original(to, function, args=args, **kwargs)

    api.rpc_async = recording
    nothing, numbers = api._all_gather(None), api._all_gather(rank)
    return list(sent), nothing, numbers  # shutdown gathers, too


def test_the_end_of_a_barrier_carries_no_names():
    names = ["worker0", "worker1", "worker2"]
    ranks = {name: rank for rank, name in enumerate(names)}
    for rank, (sent, nothing, numbers) in enumerate(run_ranks(gather_twice, 3)):
        assert sent == ([None, None, ranks, ranks] if rank == 0 else [])
        assert nothing == dict.fromkeys(names)
        assert numbers == ranks


def test_a_worker_cannot_report_to_gatherings_without_bound():
    with workers(2):
        for number in range(gather._MOST_EARLY_REPORTS):
            rpc.rpc_sync("worker1", api._gather_to_leader, args=(f"x{number}", "worker0", None, {"worker0"}))
        with pytest.raises(rpc.RpcError, match="too many gatherings"):
            rpc.rpc_sync("worker1", api._gather_to_leader, args=("one more", "worker0", None, {"worker0"}))
        other = rpc.rpc_async("worker1", api._all_gather, args=(1,))  # the group gathers as ever
        assert api._all_gather(0) == other.wait() == {"worker0": 0, "worker1": 1}


# --- Profiles ---


def test_a_worker_with_a_list_is_profiled_by_others_only_if_the_list_says_so():
    with workers(2, allowed_functions=["aten::add"]):
        for function, args in ((profiler._start, ({},)), (profiler._stop, ())):
            with pytest.raises(NotAllowedError, match=r"torchrpc\.profiler\.profile: its allowed_functions"):
                rpc.rpc_sync("worker1", function, args=args)
    with workers(2, allowed_functions=[profiler.profile]):
        with profiler.profile() as profile:
            pass
        assert set(profile.traces) == {"worker0", "worker1"}


def take_profile(worker):
    rpc.rpc_sync(worker, profiler._stop)


def test_a_worker_cannot_take_the_profile_of_another():
    with workers(3), profiler.profile(["worker1"]) as profile:
        with pytest.raises(RuntimeError, match="worker2 cannot end the profile of worker0"):
            rpc.rpc_sync("worker2", take_profile, args=("worker1",))
        with pytest.raises(RuntimeError, match="worker1 cannot end the profile of no other worker"):
            rpc.rpc_sync("worker1", take_profile, args=("worker0",))
    assert set(profile.traces) == {"worker0", "worker1"}


# --- Modules and optimizers of listed classes ---

ran: list = []


def note(*args, **kwargs):
    ran.append(args)
    return torch.ones(1)


class Listed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, value):
        return value * self.weight

    def __setstate__(self, state):
        self.__dict__.update(state)


class Derived(Listed):
    """Not listed, though its base is."""

    def forward(self, value):
        return note(value)

    def parameters(self, recurse=True):
        return note(recurse)

    def train(self, mode=True):
        return note(mode)


class Callable:
    """Listed; its `__call__`, whose name begins with an underscore, is not."""

    def __call__(self, *args, **kwargs):
        return note(*args)


class OwnSGD(torch.optim.SGD):
    pass


class DerivedSGD(OwnSGD):
    def step(self, closure=None):
        note(closure)

    def state_dict(self):
        return note()

    def load_state_dict(self, state_dict):
        note(state_dict)


def has_run():
    return len(ran)


def make_derived():
    return Derived()


def make_shadowed():
    module = Listed()
    for name in ("forward", "parameters", "train"):
        module.__dict__[name] = Callable()
    return module


def make_part(kind):
    parameter = rpc.RRef(torch.nn.Parameter(torch.ones(2)))
    local = _parts._LocalOptimizer(kind, [{"params": [parameter]}], (), {"lr": 0.1}, False)
    return local


def make_shadowed_part():
    local = make_part(OwnSGD)
    for name in ("step", "state_dict", "load_state_dict"):
        local.optim.__dict__[name] = Callable()
    return local


LISTED = [
    Listed,
    Callable,
    OwnSGD,
    has_run,
    make_derived,
    make_shadowed,
    make_shadowed_part,
    make_part,
    "torch.nn.Linear",
    "torch.nn.modules.linear.Linear",
]


@pytest.fixture(scope="module")
def worker():
    with workers(2, allowed_functions=LISTED):
        yield "worker1"


@pytest.mark.parametrize("make", [make_derived, make_shadowed])
def test_a_module_runs_only_methods_of_a_listed_class(worker, make):
    before = rpc.rpc_sync(worker, has_run)
    rref = rpc.remote(worker, make)
    for function, args in (
        (remote_module._run_forward, (rref, "cpu", False, (torch.ones(2),), {})),
        (remote_module._parameter_rrefs, (rref, True)),
        (remote_module._set_training, (rref, True)),
    ):
        with pytest.raises(NotAllowedError, match=r"(Derived|Listed)\.(forward|parameters|train)"):
            rpc.rpc_sync(worker, function, args=args)
    with pytest.raises(NotAllowedError):
        rref.rpc_sync().forward(torch.ones(2))
    assert rpc.rpc_sync(worker, has_run) == before


def test_a_listed_module_works(worker):
    module = RemoteModule(worker, Listed)
    assert module(torch.ones(2)).tolist() == [1, 1]
    assert len(module.remote_parameters()) == 1
    assert module.eval().training is False


@pytest.mark.parametrize("shadowed", [False, True])
def test_an_optimizer_runs_only_methods_of_a_listed_class(worker, shadowed):
    before = rpc.rpc_sync(worker, has_run)
    if shadowed:
        rref = rpc.remote(worker, make_shadowed_part)
        for function, args in (
            (_parts._step, (rref, 0, None)),
            (_parts._state, (rref,)),
            (_parts._load, (rref, [], [])),
        ):
            with pytest.raises(NotAllowedError, match=r"OwnSGD\.(step|state_dict|load_state_dict)"):
                rpc.rpc_sync(worker, function, args=args)
    else:
        with pytest.raises(NotAllowedError, match="DerivedSGD"):
            rpc.rpc_sync(worker, _parts._make, args=(DerivedSGD, [], (), {}, False))
    assert rpc.rpc_sync(worker, has_run) == before


def test_an_optimizer_keeps_its_parameters(worker):
    rref = rpc.remote(worker, make_part, args=(OwnSGD,))
    other = [torch.zeros(2)]
    for function, args in (
        (_parts._step, (rref, 0, [{"params": other}])),
        (_parts._load, (rref, [{}], [{"params": other}])),
    ):
        with pytest.raises(ValueError, match="cannot have params"):
            rpc.rpc_sync(worker, function, args=args)
    rpc.rpc_sync(worker, _parts._step, args=(rref, 0, [{"lr": 0.5, "initial_lr": 1.0}]))


def test_an_optimizer_function_takes_no_other_object(worker):
    rref = rpc.remote(worker, Listed)
    for function, args in ((_parts._step, (rref, 0, None)), (_parts._state, (rref,)), (_parts._load, (rref, [], []))):
        with pytest.raises(TypeError, match="not to a part of a DistributedOptimizer"):
            rpc.rpc_sync(worker, function, args=args)


def test_a_listed_optimizer_works(worker):
    module = RemoteModule(worker, Listed)
    optimizer = DistributedOptimizer(OwnSGD, module.remote_parameters(), lr=0.1)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert optimizer.state_dict() == state
