"""Short versions of code that uses torch.distributed.rpc in other projects, with the private names that they use.

The ranks of a group whose torch.distributed.rpc is replaced run each function below; it fails by raising.
"""

import functools
import os
import pickle
import queue
import threading
import time
from collections import defaultdict, deque

import pytest
import torch
import torch.distributed as dist
from waiting import eventually

from torchrpc.testing import RankError, free_port, run_ranks

USERS = []


def user(project, does, ranks=2):
    """Register a function: the project with such code, what the code does, and the number of ranks."""

    def enter(function):
        USERS.append(pytest.param(function, ranks, id=f"{project}: {does}"))
        return function

    return enter


def run_replaced(rank, function, ranks):
    import torchrpc

    torchrpc.install()
    function(rank, ranks)
    import torch.distributed.rpc as rpc

    assert rpc.__name__ == "torchrpc.rpc" and not rpc._is_current_rpc_agent_set()


def options(rpc, **more):
    return rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://localhost:{os.environ['MASTER_PORT']}", **more)


def wait_for_worker(rpc, name):
    """Poll for a worker, as many programs do."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            return rpc.get_worker_info(name)
        except RuntimeError:
            time.sleep(0.01)  # the user's program, which is under test, polls
    raise RuntimeError(f"{name} has not come")


_done = threading.Event()


def serve(rank):
    """Serve calls in a group without a fixed size until rank 0 ends."""
    from torch.distributed import rpc

    if rank == 0:
        for info in rpc._get_current_rpc_agent().get_worker_infos():
            rpc.rpc_sync(info, _let_go)
    assert _done.wait(60)
    rpc.shutdown()


def _let_go():
    _done.set()


# --- TorchRL ---


def accepts_rref(method):
    @functools.wraps(method)
    def unpack(self, *args, **kwargs):
        if type(self) is torch._C._distributed_rpc.PyRRef:
            assert isinstance(self, torch._C._distributed_rpc.PyRRef)
            self = self.local_value()
        return method(self, *args, **kwargs)

    return unpack


class Collector:
    def __init__(self, make_env, policy, *, frames_per_batch, total_frames=-1):
        self.env, self.policy, self.frames, self.closed = make_env(), policy, frames_per_batch, False

    @accepts_rref
    def next(self):
        with torch.no_grad():
            return {"observation": self.policy(torch.full((self.frames, 2), self.env)), "done": torch.zeros(1).bool()}

    @accepts_rref
    def update(self, weights):
        self.policy.load_state_dict(weights)

    @accepts_rref
    def shutdown(self):
        self.closed = True
        return self.closed


class CloudpickleWrapper:
    """A callable that pickles its own code."""

    def __init__(self, fn):
        self.fn = fn

    def __getstate__(self):
        return pickle.dumps(self.fn)

    def __setstate__(self, state):
        self.fn = pickle.loads(state)

    def __call__(self, *args, **kwargs):
        return self.fn(*args, **kwargs)


def make_env():
    return 2.0


@user("TorchRL", "collects batches on remote nodes by polling futures", ranks=3)
def collect(rank, ranks):
    from torch.distributed import rpc

    os.environ["MASTER_ADDR"] = "localhost"
    tensorpipe_options = {"num_worker_threads": 16, "rpc_timeout": 10_000, "_transports": ["uv"]}
    name = f"COLLECTOR_NODE_{rank}" if rank else "TRAINER_NODE"
    rpc.init_rpc(
        name,
        rank=rank,
        backend=rpc.BackendType.TENSORPIPE,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(devices=None, **tensorpipe_options),
        world_size=ranks,
    )
    if rank == 0:
        infos = [wait_for_worker(rpc, f"COLLECTOR_NODE_{i}") for i in range(1, ranks)]
        policy = torch.nn.Linear(2, 2)
        rrefs = [
            rpc.remote(
                info,
                Collector,
                args=(CloudpickleWrapper(make_env), policy),
                kwargs={"frames_per_batch": 4, "total_frames": -1},
            )
            for info in infos
        ]
        futures = deque((rpc.rpc_async(infos[i], Collector.next, args=(rrefs[i],)), i) for i in range(len(infos)))
        batches = 0
        while batches < 6:
            future, i = futures.popleft()
            if future.done():
                assert torch.equal(future.value()["observation"], policy(torch.full((4, 2), 2.0)))
                batches += 1
                rpc.rpc_sync(infos[i], Collector.update, args=(rrefs[i], policy.state_dict()))
                future = rpc.rpc_async(infos[i], Collector.next, args=(rrefs[i],))
            futures.append((future, i))
        for future, _ in futures:
            future.wait()
        for info, rref in zip(infos, rrefs, strict=True):
            assert rpc.rpc_sync(info, Collector.shutdown, args=(rref,), timeout=20)
    rpc.shutdown(timeout=60)


class ReplayBuffer:
    def __init__(self, capacity):
        self.data = deque(maxlen=capacity)

    @accepts_rref
    def extend(self, batch):
        self.data.extend(batch.unbind())
        return len(self.data)

    @accepts_rref
    def sample(self, count):
        return torch.stack(list(self.data)[:count])


@user("TorchRL", "fills a remote replay buffer in a group that grows", ranks=3)
def replay(rank, ranks):
    from torch.distributed import rpc

    name = ["TRAINER", "BUFFER", "COLLECTOR"][rank]
    rpc.init_rpc(name, rank=rank, backend=rpc.BackendType.TENSORPIPE, rpc_backend_options=options(rpc))
    if rank == 0:
        wait_for_worker(rpc, "COLLECTOR")
        buffer = rpc.remote(wait_for_worker(rpc, "BUFFER"), ReplayBuffer, args=(8,))
        ret = rpc.rpc_sync(buffer.owner(), ReplayBuffer.extend, args=(buffer, torch.arange(10.0)))
        assert ret == 8
        filled = rpc.remote("COLLECTOR", ReplayBuffer.extend.__wrapped__, args=(ReplayBuffer(4), torch.ones(2)))
        assert filled.to_here() == 2
        sample = rpc.rpc_async(buffer.owner(), ReplayBuffer.sample, args=(buffer, 2)).wait()
        assert sample.tolist() == [2.0, 3.0] and buffer.rpc_sync().sample(1).tolist() == [2.0]
    serve(rank)


# --- tensordict ---


def fill(data, index):
    data["memory"][index] = 1
    return data


@user("tensordict", "polls for a worker without a world size, then calls an object that pickles itself")
def benchmark(rank, ranks):
    from torch.distributed import rpc

    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    rpc.init_rpc(
        ["Main", "worker"][rank],
        rank=rank,
        backend=rpc.BackendType.TENSORPIPE,
        rpc_backend_options=options(rpc, num_worker_threads=16),
    )
    if rank == 0:
        info = wait_for_worker(rpc, "worker")
        data = {"memory": torch.zeros(10, 3, dtype=torch.uint8)}
        back = rpc.rpc_sync(info, CloudpickleWrapper(fill), args=(data, [0, 9]))
        assert back["memory"].sum() == 6 and data["memory"].sum() == 0
    serve(rank)


# --- PyG, GraphLearn ---

_calls = {}


def call_registered(call_id, *args, **kwargs):
    return _calls[call_id](*args, **kwargs)


@user("PyG", "routes calls to partitions over transports and channels that are not all there", ranks=3)
def sample_neighbours(rank, ranks):
    from torch.distributed import rpc

    try:
        from torch._C._distributed_rpc import _is_current_rpc_agent_set
    except ImportError:
        pytest.fail("PyG replaces this missing name by a function that always returns False")

    @rpc.api._require_initialized
    def gather(obj, timeout=None):
        return rpc.api._all_gather(obj) if timeout is None else rpc.api._all_gather(obj, timeout=timeout)

    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        gather(None)
    assert not _is_current_rpc_agent_set()
    rpc.init_rpc(
        name=f"dist-group-{rank}",
        rank=rank,
        world_size=ranks,
        rpc_backend_options=options(
            rpc, _transports=["ibv", "uv"], _channels=["mpt_uv", "basic"], num_worker_threads=16, rpc_timeout=240.0
        ),
    )
    assert _is_current_rpc_agent_set()
    gather(None, timeout=240.0)
    partitions = [[] for _ in range(ranks)]
    for name, (_, _, index) in gather(("worker", ranks, rank)).items():
        partitions[index].append(name)
    _calls[0] = lambda ids: ids + rank
    gather(None)
    ids = torch.arange(3)
    futures = [rpc.rpc_async(to=to, func=call_registered, args=(0, ids), kwargs=None) for (to,) in partitions]
    assert [future.wait().tolist() for future in futures] == [[i, i + 1, i + 2] for i in range(ranks)]
    assert rpc.rpc_async(to=(rank + 1) % ranks, func=call_registered, args=(0, ids)).wait()[0] == (rank + 1) % ranks
    gather(None)
    if _is_current_rpc_agent_set():
        rpc.shutdown(True, 240.0)


GRAPHLEARN = """
import atexit, collections, subprocess, sys, threading
import torch
from torch.distributed import rpc

initialized = False
states = collections.defaultdict(rpc.AllGatherStates)
lock = threading.RLock()

def shutdown_rpc(graceful=True):
    global initialized
    if initialized is True:
        rpc.shutdown(graceful=graceful)
        initialized = None

atexit.register(shutdown_rpc, False)

def gather_to_leader(number, name, obj, names):
    with lock:
        states[number].gathered_objects[name] = obj
        if names == set(states[number].gathered_objects):
            states[number].proceed_signal.set()

def broadcast(number, objects):
    states[number].gathered_objects = objects
    states[number].proceed_signal.set()

def all_gather(number, me, obj, names):
    timeout = rpc.get_rpc_timeout()
    leader = sorted(names)[0]
    if me == leader:
        gather_to_leader(number, me, obj, names)
    else:
        rpc.rpc_sync(leader, gather_to_leader, args=(number, me, obj, names), timeout=timeout)
    states[number].proceed_signal.wait()
    if me == leader:
        for name in names - {leader}:
            rpc.rpc_async(name, broadcast, args=(number, states[number].gathered_objects), timeout=timeout).wait()
    return states[number].gathered_objects

def double(x):
    return 2 * x

def run(rank, port):
    global initialized
    options = rpc.TensorPipeRpcBackendOptions(
        _transports=["uv"], _channels=["mpt_uv", "basic"], num_worker_threads=16, rpc_timeout=180,
        init_method=f"tcp://localhost:{port}")
    torch.distributed.constants.default_pg_timeout = 180
    name = f"_default_worker_{rank}"
    rpc.init_rpc(name=name, rank=rank, world_size=2, rpc_backend_options=options)
    initialized = True
    roles = rpc.api._all_gather(("worker", 2, rank), timeout=180)
    assert all_gather(0, name, rank, set(roles)) == {"_default_worker_0": 0, "_default_worker_1": 1}
    assert rpc.rpc_async(to=1 - rank, func=double, args=(21,)).wait() == 42
    try:
        rpc.api._all_gather(None, timeout=180)
    except RuntimeError:  # a follower may have ended before the leader gets its reply
        pass
    sys.stdout.write(f"{rpc.__name__} done\\n")  # in one piece: both ranks write to the same pipe

port, rank = map(int, sys.argv[1:])
if rank == 0:
    other = subprocess.Popen([sys.executable, __file__, str(port), "1"])
run(rank, port)
if rank == 0:
    sys.exit(other.wait())
"""


def test_graphlearn_gathers_by_roles_and_shuts_down_at_exit(run_python, tmp_path):
    (tmp_path / "script.py").write_text(GRAPHLEARN)
    result = run_python("-m", "torchrpc", "script.py", free_port(), 0)
    assert result.stdout.split("\n")[:2] == ["torchrpc.rpc done"] * 2
    assert "Traceback" not in result.stderr


# --- FedML ---


class Message:
    def __init__(self, kind=0, sender=0):
        self.params = {"msg_type": kind, "sender": sender}

    def add_params(self, key, value):
        self.params[key] = value


class Servicer:
    """A singleton; calls use a class method."""

    _instance = None

    def __new__(cls, client_id):
        if cls._instance is None:
            cls._instance = super().__new__(cls)
            cls._instance.client_id, cls._instance.messages = client_id, queue.Queue()
        return cls._instance

    @classmethod
    def sendMessage(cls, client_id, message):
        cls._instance.messages.put((client_id, message))


@user("FedML", "passes messages to a class method with 512 threads and no time limit", ranks=3)
def federate(rank, ranks):
    from torch.distributed import rpc

    servicer = Servicer(rank)
    rpc.init_rpc(
        f"worker{rank}",
        backend=rpc.BackendType.TENSORPIPE,
        rank=rank,
        world_size=ranks,
        rpc_backend_options=options(rpc, num_worker_threads=512, rpc_timeout=0, _transports=["uv"]),
    )
    assert rpc.get_rpc_timeout() == 0
    message = Message(1, rank)
    message.add_params("model_params", torch.nn.Linear(3, 3).state_dict())
    to = 0 if rank else 1
    rpc.rpc_sync(f"worker{to}", Servicer.sendMessage, args=(rank, message))
    for _ in range(2 if rank == 0 else rank == 1):
        sender, came = servicer.messages.get(timeout=30)
        assert came.params["sender"] == sender and came.params["model_params"]["weight"].shape == (3, 3)
    rpc.shutdown()


@user("FedML", "maps devices that a machine without accelerators has not")
def map_devices(rank, ranks):
    from torch.distributed import rpc

    mapped = options(rpc, num_worker_threads=16, rpc_timeout=60, _transports=["uv"])
    mapped.set_device_map(f"worker{1 - rank}", {0: 0})
    with pytest.raises(ValueError, match="Node worker0 has source devices with invalid indices in its device map"):
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=ranks, rpc_backend_options=mapped)


# --- Pipelines: fairscale, PiPPy, ColossalAI, ATorch ---


class Stage(torch.nn.Module):
    instance = None

    def __init__(self, width, successor=None):
        super().__init__()
        self.layer, self.successor, self.work = torch.nn.Linear(width, width), successor, queue.Queue()
        self.seen = threading.Event()

    def run(self, me):
        assert me.local_value() is self
        while (item := self.work.get()) is not None:
            item.append(True)
            self.seen.set()

    def put(self, item):
        self.work.put(item)
        return item is None or self.seen.wait(30)

    def forward(self, x):
        x = to_here(x)
        y = self.layer(x)
        return y if self.successor is None else self.successor.rpc_sync().forward(y)

    @staticmethod
    def _register(args, kwargs):
        Stage.instance = Stage(*args, **kwargs)

    @staticmethod
    def _count():
        return sum(p.numel() for p in Stage.instance.parameters())

    def parameter_rrefs(self):
        from torch.distributed.rpc import RRef

        return [RRef(p) for p in self.parameters()]


def to_here(value):
    return value.to_here() if isinstance(value, torch._C._distributed_rpc.PyRRef) else value


@user("fairscale", "drives stages on all ranks of a process group by static methods")
def drive_stages(rank, ranks):
    from torch.distributed import rpc

    dist.init_process_group(
        "gloo", init_method=f"tcp://localhost:{os.environ['MASTER_PORT']}", rank=rank, world_size=ranks
    )
    rpc.init_rpc(
        f"Test{rank}",
        rank=rank,
        world_size=ranks,
        backend=rpc.BackendType.TENSORPIPE,
        rpc_backend_options=options(rpc, rpc_timeout=20),
    )
    if rank == 0:
        names = [f"Test{i}" for i in range(1, ranks)]
        torch.futures.wait_all([rpc.rpc_async(name, Stage._register, args=((4,), {})) for name in names])
        assert [rpc.rpc_async(name, Stage._count, args=None).wait() for name in names] == [20]
    rpc.shutdown()
    dist.destroy_process_group()


@user("PiPPy", "runs stages that hold RRefs to themselves and to the next", ranks=3)
def pipeline(rank, ranks):
    import torch.distributed.autograd as dist_autograd
    import torch.distributed.rpc as rpc
    from torch.distributed.optim import DistributedOptimizer

    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=ranks, rpc_backend_options=options(rpc, num_worker_threads=512))
    names = [worker.name for worker in rpc._get_current_rpc_agent().get_worker_infos()]
    rpc.api._barrier(names)
    if rank == 0:
        last = rpc.remote("worker2", Stage, (4,))
        first = rpc.remote(1, Stage, (4,), {"successor": last})
        running = first.rpc_async(timeout=0).run(first)
        assert first.rpc_sync().put([]) and first.remote().put(None).to_here()
        running.wait()
        for rref in (first, last):
            eventually(rref.confirmed_by_owner)  # no call has waited for the object of the last one
            assert rref.owner_name() == rref.owner().name
        parameters = [p for stage in (first, last) for p in stage.rpc_sync().parameter_rrefs()]
        optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
        losses = []
        for _ in range(2):
            with dist_autograd.context() as context_id:
                losses.append(first.rpc_sync().forward(rpc.RRef(torch.ones(1, 4))).pow(2).sum())
                dist_autograd.backward(context_id, losses[-1:])
                optimizer.step(context_id)
        assert losses[1] < losses[0]
    torch.distributed.rpc.api._wait_all_workers()
    rpc.shutdown()


# --- Others ---


class RpcException(Exception):
    """Made from an exception on the callee, and from a text on the caller."""

    def __init__(self, cause):
        super().__init__(cause if isinstance(cause, str) else f"wrapped {cause!r}")


def call_wrapped(func, args):
    try:
        return func(*args)
    except BaseException as exc:
        raise RpcException(exc) from exc


@user("Machin", "keeps a table of services at rank 0 and raises exceptions of its own", ranks=2)
def serve_table(rank, ranks):
    from torch.distributed import rpc

    rpc.init_rpc(f"{rank}", rank=rank, world_size=ranks, rpc_backend_options=options(rpc, rpc_timeout=60))
    names = {info.id: info.name for info in rpc._get_current_rpc_agent().get_worker_infos()}
    assert names == {0: "0", 1: "1"}
    with pytest.raises(RpcException, match=r"wrapped ZeroDivisionError"):
        rpc.rpc_sync(names[1 - rank], call_wrapped, args=(divmod, (1, 0)))
    assert rpc.rpc_sync(names[1 - rank], call_wrapped, args=({"a": rank}.get, ("a",))) == rank
    rpc.shutdown()


@user("Lightning", "reads defaults from constants and takes the rest from the environment")
def plug_in(rank, ranks):
    from torch.distributed import rpc
    from torch.distributed.rpc.constants import DEFAULT_RPC_TIMEOUT_SEC

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    rpc.init_rpc(
        f"worker{int(os.environ['RANK'])}",
        world_size=int(os.environ["WORLD_SIZE"]),
        backend=rpc.BackendType["TENSORPIPE"],
    )
    rpc._set_rpc_timeout(DEFAULT_RPC_TIMEOUT_SEC)
    assert rpc.get_worker_info().id == rank
    if torch.distributed.rpc.api._is_current_rpc_agent_set():
        rpc.shutdown()


class Observer:
    def __init__(self):
        self.episodes = 0

    def run_episode(self, agent):
        self.episodes += 1
        for step in range(3):
            remote_method(Agent.choose, agent, torch.full((2,), float(step)))
        return self.episodes


class Agent:
    def __init__(self, rpc, names):
        self.rref = rpc.RRef(self)
        self.chosen = defaultdict(list)
        self.lock = threading.Lock()
        self.observers = [rpc.remote(rpc.get_worker_info(name), Observer) for name in names]

    def choose(self, state):
        with self.lock:
            self.chosen["all"].append(state.sum().item())

    def run(self, rpc):
        futures = [
            rpc.rpc_async(o.owner(), call_method, args=(Observer.run_episode, o, self.rref)) for o in self.observers
        ]
        return [future.wait() for future in futures]


def call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def remote_method(method, rref, *args, **kwargs):
    from torch.distributed import rpc

    return rpc.rpc_sync(rref.owner(), call_method, args=[method, rref, *args], kwargs=kwargs)


@user("pytorch/examples", "has observers call the agent that called them", ranks=3)
def observe(rank, ranks):
    import torch.distributed.rpc as rpc

    os.environ["MASTER_ADDR"] = "localhost"
    rpc.init_rpc("agent" if rank == 0 else f"observer{rank}", rank=rank, world_size=ranks)
    if rank == 0:
        agent = Agent(rpc, [f"observer{i}" for i in range(1, ranks)])
        assert agent.run(rpc) == [1, 1] and agent.run(rpc) == [2, 2]
        assert sorted(agent.chosen["all"]) == sorted([0.0, 2.0, 4.0] * 4)
    rpc.shutdown()


@pytest.mark.parametrize(("function", "ranks"), USERS)
def test_code_of_users_runs(function, ranks):
    try:
        run_ranks(run_replaced, ranks, function, ranks, start_method="forkserver", init=False, timeout=60)
    except RankError as exc:
        pytest.fail(str(exc))
