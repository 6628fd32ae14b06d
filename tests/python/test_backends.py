"""Backends that users register: the arguments of their handlers, the calls they can make, the errors."""

import logging
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import torchrpc.rpc as rpc
from torchrpc.rpc import api, backend_registry
from torchrpc.testing import run_ranks


class OurOptions(rpc.TensorPipeRpcBackendOptions):
    def __init__(self, *, colour="red", **kwargs):
        super().__init__(**kwargs)
        self.colour = colour


class PlainOptions(rpc.RpcBackendOptions):
    pass


class OurAgent(rpc.TensorPipeAgent):
    def get_debug_info(self):
        return {**super().get_debug_info(), "ours.colour": self.colour}


def make_options(rpc_timeout, init_method, num_worker_threads=3, **kwargs):
    return OurOptions(rpc_timeout=rpc_timeout, init_method=init_method, num_worker_threads=num_worker_threads, **kwargs)


def make_agent(store, name, rank, world_size, rpc_backend_options):
    agent = OurAgent(store, name, rank, world_size, rpc_backend_options, {}, [])
    agent.colour = rpc_backend_options.colour
    return agent


@pytest.fixture
def register(monkeypatch):
    """Registers a backend for one test; fails if the test leaves an agent."""
    monkeypatch.setattr(backend_registry, "BackendType", backend_registry.BackendType)
    yield lambda make_options=make_options, make_agent=make_agent: backend_registry.register_backend(
        "OURS", make_options, make_agent
    )
    left = rpc._is_current_rpc_agent_set()
    if left:
        rpc._reset_current_rpc_agent()
    assert not left, "an agent was left behind"


class BareAgent(rpc.RpcAgent):
    def get_worker_info(self, name="bare"):
        return rpc.WorkerInfo(name, 7)


def test_the_base_of_agents_calls_the_methods_of_the_agent_or_says_that_it_has_none():
    agent = BareAgent()
    assert rpc.RpcAgent.get_worker_info(agent, name="other").name == "other"
    assert agent.get_worker_info().id == 7
    with pytest.raises(NotImplementedError, match="the agent of this backend, a BareAgent, has no join"):
        agent.join(shutdown=True)


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/store"


def test_the_handlers_get_the_same_arguments_as_with_torch(register, url, monkeypatch):
    calls = []

    def options(*args, **kwargs):
        calls.append((args, kwargs))
        return make_options(*args, **kwargs)

    def agent(*args, **kwargs):
        calls.append((args, kwargs))
        return make_agent(*args, **kwargs)

    backend = register(options, agent)
    made = backend_registry.construct_rpc_backend_options(backend, init_method=url, rpc_timeout=7, colour="green")
    rpc.init_rpc("w", backend=backend, rank=0, world_size=1, rpc_backend_options=made)
    try:
        assert rpc._get_current_rpc_agent().get_debug_info()["ours.colour"] == "green"
        assert rpc.rpc_sync("w", torch.add, args=(1, 2)) == 3 and rpc.get_rpc_timeout() == 7
        assert type(rpc._get_current_rpc_agent()) is OurAgent
    finally:
        rpc.shutdown()
    assert calls[0] == ((7, url), {"colour": "green"})
    args, kwargs = calls[1]
    assert args == () and isinstance(kwargs.pop("store"), dist.Store)
    assert kwargs == {"name": "w", "rank": 0, "world_size": 1, "rpc_backend_options": made}


def test_missing_options_are_made_with_the_defaults(register, monkeypatch):
    calls = []

    def options(*args, **kwargs):
        calls.append((args, kwargs))
        raise LookupError("that is enough")

    backend = register(options)
    with pytest.raises(LookupError):
        rpc.init_rpc("w", backend=backend, rank=0, world_size=1)
    assert calls == [((60.0, "env://"), {})]


def test_the_backend_is_inferred_from_its_options_and_logged(register, url, caplog):
    def agent(store, name, rank, world_size, rpc_backend_options):
        raise LookupError(f"{name} of {world_size}")

    register(lambda rpc_timeout, init_method: PlainOptions(rpc_timeout, init_method), agent)
    with caplog.at_level(logging.WARNING), pytest.raises(LookupError, match="w of 1"):
        rpc.init_rpc("w", rank=0, world_size=1, rpc_backend_options=PlainOptions(init_method=url))
    assert "BackendType.OURS" in caplog.text


def test_a_backend_that_fails_after_its_agent_has_started_leaves_none(register, url):
    def agent(**kwargs):
        api._init_rpc_states(make_agent(**kwargs))
        raise ValueError("no room")

    options = OurOptions(init_method=url)
    with pytest.raises(ValueError, match="no room"):
        rpc.init_rpc("w", backend=register(make_agent=agent), rank=0, world_size=1, rpc_backend_options=options)
    assert not rpc._is_current_rpc_agent_set()
    rpc.init_rpc("w", rank=0, world_size=1, rpc_backend_options=options)
    rpc.shutdown()


@pytest.mark.parametrize(
    ("make_options", "make_agent", "text"),
    [
        (lambda *a: None, make_agent, r"construct_rpc_backend_options_handler of BackendType\.OURS must return .* Non"),
        (make_options, lambda **k: None, r"init_backend_handler of BackendType\.OURS returned None"),
    ],
)
def test_handlers_that_return_nothing_are_named(register, url, monkeypatch, make_options, make_agent, text):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr(backend_registry, "DEFAULT_INIT_METHOD", url)
    backend = register(make_options, make_agent)
    options = None if make_options(1, url) is None else make_options(1, url)
    with pytest.raises(TypeError, match=text):
        rpc.init_rpc("w", backend=backend, rank=0, world_size=1, rpc_backend_options=options)


class OtherAgent(rpc.RpcAgent):
    def start(self):
        self.me = rpc.WorkerInfo("other", 0)

    def get_worker_info(self, worker_name="other"):
        return self.me

    def get_worker_infos(self):
        return [self.me]

    def shutdown(self):
        pass


def test_calls_with_an_agent_of_another_class_name_that_class(register, url):
    backend = register(make_agent=lambda **k: OtherAgent())
    rpc.init_rpc("other", backend=backend, rank=0, world_size=1, rpc_backend_options=OurOptions(init_method=url))
    try:
        assert rpc.get_worker_info().name == "other"
        with pytest.raises(RuntimeError, match="a OtherAgent, is not one of torchrpc's own"):
            rpc.rpc_sync("other", torch.add, args=(1, 2))
    finally:
        api._drop_agent()


def exchange(store, name, rank, world_size, rpc_backend_options):
    """Like a backend for another kind of device: workers exchange their devices over gloo before the agent starts."""
    if world_size:
        group = backend_registry._init_process_group(store, rank, world_size)
        gathered = [None] * group.size()
        dist.all_gather_object(gathered, (name, rpc_backend_options.device_maps), group)
        assert name in dict(gathered)
        agent = rpc.TensorPipeAgent(store, name, rank, world_size, rpc_backend_options, {}, [])
        api._init_rpc_states(agent)
        api._all_gather(None, timeout=rpc_backend_options.rpc_timeout)
        group.barrier().wait()
        return agent
    with rpc._utils._group_membership_management(store, name, True):
        agent = rpc.TensorPipeAgent(store, name, rank, world_size, rpc_backend_options, {}, [])
        api._init_rpc_states(agent)
        me = agent.get_worker_info()
        for worker in agent.get_worker_infos():
            api.rpc_sync(worker.name, rpc._utils._update_group_membership, args=(me, [], {}, True))
        return agent


def names():
    return sorted(worker.name for worker in rpc._get_current_rpc_agent().get_worker_infos())


def twice(rank, url):
    backend = backend_registry.register_backend("EXCHANGE", make_options, exchange)
    rpc.BackendType = backend_registry.BackendType
    for number in range(2):
        options = backend_registry.construct_rpc_backend_options(rpc.BackendType.EXCHANGE, init_method=url)
        rpc.init_rpc(f"{number}_{rank}", backend, rank, 2, options)
        assert names() == [f"{number}_0", f"{number}_1"]
        assert rpc.rpc_sync(f"{number}_{1 - rank}", rpc.get_worker_info).id == 1 - rank
        rpc.shutdown()


def test_a_users_backend_forms_one_group_after_another_on_a_store(url):
    run_ranks(twice, 2, url, start_method="forkserver", init=False)


def join(rank, folder):
    backend = backend_registry.register_backend("EXCHANGE", make_options, exchange)
    store = dist.FileStore(f"{folder}/steps", 2)
    store.set_timeout(timedelta(seconds=30))
    options = make_options(30, f"file://{folder}/store")
    if rank == 1:
        store.wait(["first"])
    rpc.init_rpc(f"w{rank}", backend, rank, None, options)
    store.set(["first", "second"][rank], "in")
    store.wait(["second"])
    assert names() == ["w0", "w1"] and rpc.rpc_sync(1 - rank, names) == ["w0", "w1"]
    store.set(f"done{rank}", "")
    store.wait(["done0", "done1"])
    rpc.shutdown()


def test_a_users_backend_lets_workers_join_a_growing_group(tmp_path):
    run_ranks(join, 2, str(tmp_path), start_method="forkserver", init=False)
