"""`torchrpc.batched`: one invocation answers many callers."""

import gc
import threading
import time
import weakref

import pytest
import torch

import torchrpc
import torchrpc.rpc as rpc
from torchrpc.rpc._calls import batching
from torchrpc.testing import workers

LONG = 30.0  # seconds; longer than a test waits


class Recorder:
    """A batched function that waits for `go`, and records its batches."""

    def __init__(self, **options):
        self.batches, self.entered, self.go = [], threading.Event(), threading.Event()
        self.go.set()

        @torchrpc.batched(**options)
        def add_one(x):
            self.entered.set()
            self.go.wait(10)
            self.batches.append(x)
            return x + 1 if isinstance(x, torch.Tensor) else [value + 1 for value in x]

        self.call = add_one


def test_a_full_batch_is_answered_at_once():
    recorder = Recorder(max_batch=3, timeout=LONG)
    futures = [recorder.call(x) for x in (1, 2, 3)]
    assert torch.futures.wait_all(futures) == [2, 3, 4]
    assert recorder.batches == [[1, 2, 3]]


def test_a_missing_caller_cannot_stall_the_others():
    recorder = Recorder(max_batch=3, timeout=0.05)
    recorder.go.clear()
    start = time.monotonic()
    futures = [recorder.call(0)]
    assert recorder.entered.wait(10)
    futures += [recorder.call(x) for x in (1, 2)]  # both arrive before their batch can begin
    recorder.go.set()
    assert torch.futures.wait_all(futures) == [1, 2, 3]
    assert 0.05 <= time.monotonic() - start < LONG
    assert recorder.batches == [[0], [1, 2]]


def test_without_a_timeout_calls_that_arrive_during_an_invocation_form_a_batch():
    recorder = Recorder(max_batch=8, timeout=0)
    recorder.go.clear()
    futures = [recorder.call(0)]
    recorder.entered.wait(10)
    futures += [recorder.call(x) for x in range(1, 6)]
    recorder.go.set()
    assert torch.futures.wait_all(futures) == [1, 2, 3, 4, 5, 6]
    assert recorder.batches == [[0], [1, 2, 3, 4, 5]]


def test_more_calls_than_fit_make_several_batches_in_order():
    recorder = Recorder(max_batch=2, timeout=0.02)
    futures = [recorder.call(x) for x in range(5)]
    assert torch.futures.wait_all(futures) == [1, 2, 3, 4, 5]
    assert [x for batch in recorder.batches for x in batch] == [0, 1, 2, 3, 4]
    assert all(len(batch) <= 2 for batch in recorder.batches)


def test_tensors_are_stacked():
    recorder = Recorder(max_batch=2, timeout=LONG)
    futures = [recorder.call(torch.full((3,), x)) for x in (1, 2)]
    assert [future.wait().tolist() for future in futures] == [[2, 2, 2], [3, 3, 3]]
    assert recorder.batches[0].shape == (2, 3)


def test_tensors_are_not_stacked_with_stack_false():
    recorder = Recorder(max_batch=2, timeout=LONG, stack=False)
    futures = [recorder.call(torch.ones(n)) for n in (1, 2)]
    assert [future.wait().tolist() for future in futures] == [[2], [2, 2]]


def test_different_shapes_are_an_error_for_all_callers():
    recorder = Recorder(max_batch=2, timeout=LONG)
    for future in [recorder.call(torch.ones(n)) for n in (1, 2)]:
        with pytest.raises(ValueError, match=r"tensors for 'x' cannot be stacked: .*stack=False"):
            future.wait()


def test_each_parameter_is_collected_and_defaults_work():
    @torchrpc.batched(max_batch=3, timeout=LONG)
    def combine(a, b, c="d"):
        return [list(values) for values in zip(a, b, c, strict=True)]

    futures = [combine(1, 2), combine(3, b=4), combine(c=5, b=6, a=7)]
    assert torch.futures.wait_all(futures) == [[1, 2, "d"], [3, 4, "d"], [7, 6, 5]]


def test_each_caller_gets_its_part_of_a_tuple():
    @torchrpc.batched(max_batch=2, timeout=LONG)
    def split(x):
        return x + 1, ["a", "b"], None

    first, second = (split(torch.tensor(x)) for x in (1, 2))
    assert first.wait() == (torch.tensor(2), "a", None)
    assert second.wait() == (torch.tensor(3), "b", None)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ([1], "returned a list of length 1. It must"),
        (torch.ones(3), r"a tensor of shape \(3,\)"),
        (torch.tensor(1), r"a tensor of shape \(\)"),
        ({}, "returned a dict. It must return a tensor whose first dimension is 2"),
    ],
)
def test_a_result_without_a_part_per_caller_is_an_error_for_all(result, text):
    @torchrpc.batched(max_batch=2, timeout=LONG)
    def wrong(x):
        return result

    for future in [wrong(1), wrong(2)]:
        with pytest.raises(TypeError, match=text):
            future.wait()


def test_an_error_reaches_all_callers_and_the_next_batch_goes_on():
    @torchrpc.batched(max_batch=2, timeout=LONG)
    def invert(x):
        if 0 in x:
            raise ValueError("Expected error")
        return [1 / value for value in x]

    for future in [invert(0), invert(1)]:
        with pytest.raises(ValueError, match="Expected error"):
            future.wait()
    assert torch.futures.wait_all([invert(1), invert(2)]) == [1, 0.5]


def test_system_exit_is_an_error_for_the_caller():
    @torchrpc.batched(max_batch=1)
    def leave(x):
        raise SystemExit(3)

    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"raised SystemExit\(3\)"):
            leave(1).wait()


def test_an_exception_in_the_list_is_for_one_caller():
    @torchrpc.batched(max_batch=2, timeout=LONG)
    def invert(x):
        return [1 / value if value else ValueError("Expected error") for value in x]

    bad, good = invert(0), invert(2)
    assert good.wait() == 0.5
    with pytest.raises(ValueError, match="Expected error"):
        bad.wait()


def test_wrong_arguments_are_an_error_for_their_caller_only():
    recorder = Recorder(max_batch=2, timeout=LONG)
    future = recorder.call(1)
    with pytest.raises(TypeError, match="too many positional arguments"):
        recorder.call(1, 2)
    assert torch.futures.wait_all([future, recorder.call(2)]) == [2, 3]


class Agent:
    def __init__(self, callers):
        self.callers, self.running, self.most = callers, 0, 0

    @torchrpc.batched(max_batch=lambda self: self.callers, timeout=LONG)
    def act(self, states):
        self.running += 1
        self.most = max(self.most, self.running)
        time.sleep(0.001)  # the function under test is slow
        self.running -= 1
        return [(state, len(states)) for state in states]


def test_each_object_has_batches_of_its_own_size():
    two, three = Agent(2), Agent(3)
    futures = [agent.act(x) for x in (1, 2, 3) for agent in (two, three) if x < 3 or agent is three]
    assert torch.futures.wait_all(futures) == [(1, 2), (1, 3), (2, 2), (2, 3), (3, 3)]


def test_one_invocation_runs_at_a_time():
    agent = Agent(1)
    torch.futures.wait_all([agent.act(x) for x in range(50)])
    assert agent.most == 1


def test_an_unused_object_and_its_thread_are_released(monkeypatch):
    monkeypatch.setattr(batching, "_IDLE_S", 0.0)
    before = threading.enumerate()
    agent = Agent(1)
    answer = agent.act(1)
    threads = set(threading.enumerate()).difference(before)
    assert answer.wait() == (1, 1)
    gone = weakref.ref(agent)
    del agent, answer
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    gc.collect()
    assert gone() is None


def test_the_thread_ends_when_idle_and_a_call_starts_another(monkeypatch):
    monkeypatch.setattr(batching, "_IDLE_S", 0.0)
    recorder = Recorder(max_batch=1)
    assert [recorder.call(x).wait() for x in range(100)] == list(range(1, 101))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_batch": 0}, ValueError, "max_batch must be at least 1, but is 0"),
        ({"max_batch": 1.5}, TypeError, "max_batch must be an int or return one, but is a float"),
        ({"timeout": -1}, ValueError, "timeout must be from 0"),
        ({"timeout": float("inf")}, ValueError, "a finite number of seconds, but is inf"),
        ({"timeout": None}, TypeError, "timeout must be a number of seconds, but is a NoneType"),
    ],
)
def test_options_out_of_range_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        torchrpc.batched(lambda x: x, **options)


def test_functions_without_named_parameters_are_refused():
    for function in (lambda *x: x, lambda **x: x, lambda *, x: x):
        with pytest.raises(TypeError, match="Name each parameter"):
            torchrpc.batched(function)
    with pytest.raises(TypeError, match="there is nothing to gather"):
        torchrpc.batched(lambda: 1)


# --- By RPC ---


@torchrpc.batched(max_batch=4, timeout=LONG)
def together(x, scale):
    """Return rows, and the number of rows in their batch."""
    return x * torch.tensor(scale)[:, None], [len(x)] * len(x)


@torchrpc.batched
def add_one(x):
    return x + 1


@torchrpc.batched
def shut_down_from_here(x):
    with pytest.raises(rpc.RpcError, match=r"shutdown\(\) cannot be called by a function"):
        rpc.shutdown(timeout=30)
    return x


@pytest.fixture(scope="module")
def server():
    with workers(2) as (_, there):
        yield there


def test_calls_of_several_callers_form_a_batch_on_the_callee(server):
    futures = [rpc.rpc_async(server, together, (torch.ones(2), float(n))) for n in range(4)]
    results = torch.futures.wait_all(futures)
    assert [(row.tolist(), n) for row, n in results] == [([n, n], 4) for n in range(4)]


def test_every_way_to_call_works(server):
    assert rpc.rpc_sync(server, add_one, (torch.ones(1),)) == 2
    assert rpc.remote(server, add_one, (torch.ones(1),)).to_here() == 2
    agent = rpc.remote(server, Agent, (3,))
    calls = [agent.rpc_async().act(1), agent.rpc_async().act(2), agent.remote().act(3)]
    assert [calls[0].wait(), calls[1].wait(), calls[2].to_here()] == [(1, 3), (2, 3), (3, 3)]


def test_a_batched_function_cannot_shut_its_worker_down(server):
    assert rpc.rpc_sync(server, shut_down_from_here, (torch.ones(1),)) == 1
    assert rpc.rpc_sync(server, add_one, (torch.ones(1),)) == 2


def test_a_batch_may_have_more_callers_than_the_server_has_threads(server):
    agent = rpc.remote(server, Agent, (64,))
    futures = [agent.rpc_async().act(n) for n in range(64)]
    assert torch.futures.wait_all(futures) == [(n, 64) for n in range(64)]


def test_it_is_the_same_function_everywhere():
    assert torchrpc.batched is rpc.batched
    assert add_one.__name__ == "add_one"
