"""A member that misbehaves: it makes up references to the values of others, as its own process allows it to."""

import itertools
import re
import struct

import pytest
import torch

import torchrpc.rpc as rpc
from torchrpc._C import PyRRef
from torchrpc.optim import DistributedOptimizer
from torchrpc.testing import workers

NOT_HELD = "does not exist on worker1, or the worker that asks for it does not hold it"
GUESSES = [(created_on, local_id, 0) for created_on in range(3) for local_id in range(12)]

kept: list = []


@pytest.fixture(scope="module", autouse=True)
def group():
    with workers(3) as names:
        yield names


@pytest.fixture
def victim():
    """worker2 holds a value of worker1. Returns the text of its reference, as a log would show it."""
    yield rpc.rpc_sync("worker2", keep, ("worker1",))
    rpc.rpc_sync("worker2", drop)


def keep(owner):
    kept.append(rpc.remote(owner, secret))
    kept[-1].to_here()
    return str(kept[-1])


def secret():
    return torch.full((2,), 7.0).requires_grad_()


def read():
    return kept[-1].to_here().tolist()


def drop():
    kept.clear()


def forks():
    return int(rpc._rref_context_get_debug_info()["num_forks"])


def serialize(rref):
    """The bytes of a reference (wire/PROTOCOL.md, "RRefs"). They begin with two ids: a worker, a number, a key."""
    serialized = rref._serialize()
    PyRRef._deserialize(serialized)  # it waits for a receiver
    return serialized[0]


def forge(rref_id, fork_id, creation=0):
    """A reference of this worker to a value of worker1."""
    # Its own reference shows the incarnations.
    owner, owner_incarnation, parent, parent_incarnation = struct.unpack_from(
        "<iQiQ", serialize(rpc.remote("worker1", secret)), 40
    )
    assert (owner, parent) == (1, 0)
    numbers = (owner, owner_incarnation, parent, parent_incarnation, creation, 0)
    return PyRRef._deserialize((struct.pack("<iQQiQQiQiQQQ", *rref_id, *fork_id, *numbers),))


def ids_in(text):
    """The ids in a text, with a key that is made up: texts show none."""
    rref, fork = re.findall(r"created_on=(\d+), local_id=(\d+)", text)
    return (*map(int, rref), 1), (*map(int, fork), 1)


def test_keys_are_not_counted():
    keys = []
    for _ in range(3):
        rref_key, fork_key = struct.unpack_from("<iQQiQQ", serialize(rpc.remote("worker1", secret)), 0)[2::3]
        keys += [rref_key, fork_key]
    keys.sort()
    assert keys[0] > 1000 and all(after - before > 1000 for before, after in itertools.pairwise(keys))


def test_guessed_references_read_nothing_and_drop_nothing(victim):
    for number, guess in enumerate(GUESSES):
        forged = forge(guess, (0, 10**6 + number, 1))
        with pytest.raises(RuntimeError, match=NOT_HELD):
            forged.to_here(timeout=20)
        with pytest.raises(RuntimeError, match=NOT_HELD):
            forged.rpc_sync(timeout=20).tolist()
    assert rpc.rpc_sync("worker2", read) == [7, 7]


def test_guessed_references_make_no_optimizer(victim):
    for number, guess in enumerate(GUESSES[:6]):
        with pytest.raises(RuntimeError, match="does not hold it"):
            DistributedOptimizer(torch.optim.SGD, [forge(guess, (0, 2 * 10**6 + number, 1))], lr=1.0)
    assert rpc.rpc_sync("worker2", read) == [7, 7]


def test_the_fork_of_another_worker_is_not_taken_over(victim):
    """Even where a log shows its ids."""
    rref, fork = ids_in(victim)
    forged = forge(rref, fork)
    with pytest.raises(RuntimeError, match=NOT_HELD):
        forged.to_here(timeout=20)
    del forged  # sends the deletion
    forge((0, 5, 1), (0, 10**7, 1))  # a message behind it
    assert rpc.rpc_sync("worker2", read) == [7, 7]
    assert rpc.rpc_sync("worker1", forks) >= 1
