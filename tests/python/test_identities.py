"""Workers that prove their names and roles, and what that permits."""

import base64
import contextlib
import dataclasses

import pytest
import torch
from outcomes import outcome_of
from waiting import eventually

import torchrpc.autograd as dist_autograd
import torchrpc.profiler as profiler
import torchrpc.rpc as rpc
from torchrpc import keygen
from torchrpc.rpc import api
from torchrpc.testing import RankError, free_port, run_ranks

NAMES = ("trainer-0", "trainer-1", "client-7")


def infer(value):
    return 2 * value


def train(value):
    return 3 * value


@dataclasses.dataclass
class Answer:
    value: int


def answer(question):
    return [Answer(question.value + 1)]


async def answer_later(question):
    return answer(question)


@pytest.fixture
def identities(tmp_path):
    """The folder with the identities of a group of two members and a client."""
    with contextlib.redirect_stdout(None):
        keygen.main(
            [str(tmp_path / "group.key"), "--member", *NAMES[:2], "--client", NAMES[2], "--folder", str(tmp_path)]
        )
    return tmp_path


def init(rank, url, folder, name=None, world_size=3, **options):
    name = name or NAMES[rank]
    options.setdefault("identity", folder / f"{NAMES[rank]}.identity")
    rpc.init_rpc(
        name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=url, **options),
    )


def call_trainer(rank, url, folder, transport):
    allowed = {"client-*": [infer, torch.add], "trainer-*": None}
    init(rank, url, folder, transport=transport, allowed_functions=allowed)
    outcomes = []
    if rank != 0:
        for function in (infer, train, torch.add, torch.mul):
            args = (torch.ones(2), 1) if function in (torch.add, torch.mul) else (torch.ones(2),)
            outcomes.append(str(outcome_of(rpc.rpc_sync, "trainer-0", function, args)))
    rpc.shutdown()
    return outcomes


@pytest.mark.parametrize("transport", ["native", "tcp"])
def test_what_a_worker_may_run_depends_on_its_name(identities, transport):
    url = f"tcp://localhost:{free_port()}"
    _, trainer, client = run_ranks(call_trainer, 3, url, identities, transport, init=False)
    assert trainer == ["tensor([2., 2.])", "tensor([3., 3.])", "tensor([2., 2.])", "tensor([1., 1.])"]
    assert client[0] == "tensor([2., 2.])"
    assert "NotAllowedError: trainer-0 does not let this caller run or send" in client[1]
    assert "'client-*': [..., 'test_identities.train']" in client[1]
    assert client[2] == "tensor([2., 2.])"
    assert "NotAllowedError" in client[3] and "aten::mul" in client[3]


class Counter:
    def __init__(self):
        self.count = 0

    def add(self, number):
        self.count += number
        return self.count


def use_objects(rank, url, folder):
    """The client may use counters; the trainer may do everything."""
    allowed = {"client-*": [Counter], "*": None}
    init(rank, url, folder, allowed_functions=allowed)
    outcomes = []
    if rank != 0:
        counter = rpc.remote("trainer-0", Counter)
        outcomes.append(str(outcome_of(counter.rpc_sync().add, 2)))
        module = outcome_of(rpc.remote, "trainer-0", torch.nn.Linear, (1, 1))
        outcomes.append(str(outcome_of(lambda: module.rpc_sync().extra_repr())))
    rpc.shutdown()
    return outcomes


def test_methods_of_objects_follow_the_callers_list(identities):
    _, trainer, client = run_ranks(use_objects, 3, f"tcp://localhost:{free_port()}", identities, init=False)
    assert trainer == ["2", "in_features=1, out_features=1, bias=True"]
    assert client[0] == "2"
    assert "not let this caller run or send torch.nn.modules.linear.Linear" in client[1]


def call_in_a_context(rank, url, folder):
    init(rank, url, folder, allowed_functions={"client-*": [infer, torch.add], "*": None})
    outcomes = []
    if rank == 2:
        with dist_autograd.context():
            outcomes.append(rpc.rpc_sync("trainer-0", torch.add, (torch.ones(2), 1)).tolist())
            weight = torch.ones(2, requires_grad=True)
            outcomes.append(str(outcome_of(rpc.rpc_sync, "trainer-0", torch.add, (weight, 1))))
        outcomes += [rpc.rpc_sync("trainer-0", infer, (torch.ones(2),)).tolist() for _ in range(10)]
    rpc.shutdown()
    return outcomes


def test_a_context_of_a_client_does_not_end_its_calls(identities):
    *_, (plain, recorded, *later) = run_ranks(
        call_in_a_context, 3, f"tcp://localhost:{free_port()}", identities, init=False
    )
    assert plain == [2.0, 2.0] and "only members of the group may take part in autograd" in recorded
    assert later == [[2.0, 2.0]] * 10


def small_view():
    private = torch.full((8, 8), 7777)
    private[:, 3] = 1
    return private[:, 3]


def take_a_view(rank, url, folder):
    init(rank, url, folder)
    view = rpc.rpc_sync("trainer-0", small_view) if rank else torch.ones(8)
    rpc.shutdown()
    return view.tolist(), view.untyped_storage().nbytes()


def test_a_view_brings_nothing_of_the_memory_around_it(identities):
    _, trainer, client = run_ranks(take_a_view, 3, f"tcp://localhost:{free_port()}", identities, init=False)
    assert trainer == client == ([1] * 8, 8 * 8)


def ask_without_pickles(rank, url, folder):
    allowed = {"client-*": [answer, answer_later, Answer], "trainer-*": [Answer]}
    init(rank, url, folder, pickle="off", allowed_functions=allowed)
    outcomes = []
    if rank == 2:
        for function in (answer, answer_later):
            outcomes.append(outcome_of(rpc.rpc_sync, "trainer-0", function, (Answer(1),)))
            outcomes.append(outcome_of(rpc.remote("trainer-0", function, (Answer(1),)).to_here))
    rpc.shutdown()
    return outcomes


def test_results_without_pickle_may_be_of_the_classes_that_the_caller_may_use(identities):
    *_, outcomes = run_ranks(ask_without_pickles, 3, f"tcp://localhost:{free_port()}", identities, init=False)
    assert outcomes == [[Answer(2)]] * 4


def lend(rref):
    return rref.rpc_sync().extra_repr()


def borrow(rank, url, folder):
    """The trainer makes a module on trainer-0, and the client gets hold of a reference to it."""
    init(rank, url, folder, allowed_functions={"client-*": [infer], "*": None} if rank == 0 else None)
    outcome = None
    if rank == 1:
        module = rpc.remote("trainer-0", torch.nn.Linear, (1, 1))
        outcome = str(outcome_of(rpc.rpc_sync, "client-7", lend, (module,)))
    rpc.shutdown()
    return outcome


def test_a_reference_gives_a_client_no_methods_beyond_its_list(identities):
    _, outcome, _ = run_ranks(borrow, 3, f"tcp://localhost:{free_port()}", identities, init=False)
    assert "not let this caller run or send torch.nn.modules.linear.Linear.extra_repr" in outcome


def work_of_the_group(rank, url, folder):
    init(rank, url, folder, allowed_functions={"client-*": [infer], "trainer-*": None})
    outcomes = {}
    if rank == 2:

        def in_context():
            with dist_autograd.context():
                rpc.rpc_sync("trainer-0", infer, (torch.ones(2, requires_grad=True),))

        def in_profile():
            with profiler.profile(workers=["trainer-0"]):
                rpc.rpc_sync("trainer-0", infer, (1,))

        def use_rref():
            return rpc.remote("trainer-0", infer, (21,)).to_here()

        def gather():
            return rpc.rpc_sync(
                "trainer-0", api._gather_to_leader, ("0" * 32 + "-9", "client-7", b"kept", ["client-7"])
            )

        for function in (in_context, in_profile, use_rref, gather):
            outcomes[function.__name__] = str(outcome_of(function))
    rpc.shutdown()
    return outcomes


def test_a_client_takes_no_part_in_the_work_of_the_group(identities):
    *_, outcomes = run_ranks(work_of_the_group, 3, f"tcp://localhost:{free_port()}", identities, init=False)
    assert "client" in outcomes["in_context"] and "NotAllowedError" in outcomes["in_context"]
    assert "client" in outcomes["in_profile"] and "NotAllowedError" in outcomes["in_profile"]
    assert outcomes["use_rref"] == "42"
    assert "trainer-0 lets client-7, a client, take part in barriers only" in outcomes["gather"]


def join_without_identity(rank, url, folder):
    """Rank 1 knows the group's secret, and takes the name of a trainer."""
    options = {}
    if rank == 1:
        lines = (folder / "client-7.identity").read_text().splitlines()
        secret = next(line.removeprefix("secret: ") for line in lines if line.startswith("secret: "))
        options = {"identity": None, "secret": base64.b64decode(secret)}
    init(rank, url, folder, world_size=2, **options)
    done, outcome = folder / "done", None
    if rank == 1:
        outcome = outcome_of(rpc.rpc_sync, "trainer-0", train, (1,))
        done.touch()
    eventually(done.exists, 60)
    rpc.shutdown(graceful=False)
    return outcome


def test_the_secret_alone_makes_no_member(identities):
    *_, outcome = run_ranks(join_without_identity, 2, f"tcp://localhost:{free_port()}", identities, init=False)
    assert "WorkerLostError" in outcome and "trainer-1" in outcome and "torchrpc keygen" in outcome


def start(rank, url, folder, options):
    init(rank, url, folder, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "trainer-9"}, "the identity of worker trainer-0 was given to worker trainer-9"),
        ({"identity": "nowhere.identity"}, "the option identity names nowhere.identity, which cannot be read"),
        ({"secret": "0123456789abcdef"}, "give no other secret beside it"),
        ({"transport": "tensorpipe"}, "an identity was given"),
        ({"identity": None, "allowed_functions": {"client-*": [infer]}}, "any worker can take any name"),
    ],
)
def test_a_wrong_identity_is_an_error_of_the_start(identities, options, words):
    with pytest.raises(RankError, match=words):
        run_ranks(start, 1, f"tcp://localhost:{free_port()}", identities, {"world_size": 1, **options}, init=False)


def test_an_identity_that_others_may_read_is_refused(identities):
    (identities / "trainer-0.identity").chmod(0o644)
    with pytest.raises(RankError, match="others than its owner may read"):
        run_ranks(start, 1, f"tcp://localhost:{free_port()}", identities, {"world_size": 1}, init=False)


@pytest.mark.parametrize(
    ("allowed", "error", "words"),
    [
        ({}, ValueError, "to allow nothing, give an empty list"),
        ({"": [infer]}, ValueError, "empty key"),
        ({1: [infer]}, TypeError, "no str"),
        ({"client-*": "infer"}, TypeError, "is the str 'infer'"),
    ],
)
def test_wrong_patterns_of_callers_are_refused(allowed, error, words):
    with pytest.raises(error, match=words):
        rpc.TensorPipeRpcBackendOptions(allowed_functions=allowed)
