"""Distributed autograd in programs: threads, references, futures, DistributedDataParallel, many passes."""

import gc
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import torchrpc.autograd as dist_autograd
import torchrpc.rpc as rpc
from torchrpc.testing import run_ranks, workers


@pytest.fixture
def group():
    with workers(3):
        yield


def leaf(factor=1.0):
    return torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).mul_(factor).requires_grad_()


weight = leaf()


def times_weight(x):
    return x * weight


def gradient_of_weight(context_id):
    return dist_autograd.get_gradients(context_id)[weight]


# --- threads ---


def test_threads_with_different_contexts_use_one_model_concurrently(group):
    at_once = threading.Barrier(4)

    def train(thread):
        at_once.wait(30)
        for step in range(20):
            x = leaf(thread + step)
            with dist_autograd.context() as context_id:
                middle = rpc.rpc_sync("worker1", times_weight, (x,))
                loss = rpc.rpc_sync("worker2", times_weight, (middle,)).sum()
                dist_autograd.backward(context_id, [loss])
                gradients = dist_autograd.get_gradients(context_id)
                assert list(gradients) == [x]
                torch.testing.assert_close(gradients[x], weight.detach() ** 2)
                for worker in ("worker1", "worker2"):
                    gradient = rpc.rpc_sync(worker, gradient_of_weight, (context_id,))
                    torch.testing.assert_close(gradient, x.detach() * weight.detach())
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(train, range(1, 5)))


def test_a_context_belongs_to_its_thread_only(group):
    def elsewhere():
        with pytest.raises(RuntimeError, match="no autograd context"):
            dist_autograd._current_context()
        return rpc.rpc_sync("worker1", times_weight, (leaf(),))

    with dist_autograd.context() as context_id, ThreadPoolExecutor(1) as thread:
        assert thread.submit(elsewhere).result(30).grad_fn is None
        mine = rpc.rpc_sync("worker1", times_weight, (leaf(),))
        assert mine.grad_fn is not None and dist_autograd._current_context()._context_id() == context_id


def test_contexts_do_not_nest_and_the_outer_one_remains(group):
    with dist_autograd.context() as outer:
        with pytest.raises(RuntimeError, match=f"Already have an autograd context id for this thread: {outer}"):
            dist_autograd.context().__enter__()
        assert dist_autograd._current_context()._context_id() == outer
    with dist_autograd.context() as following:
        assert following != outer


# --- references ---


def test_a_pass_from_a_reference_runs_on_its_owner(group):
    with dist_autograd.context() as context_id:
        x = leaf()
        middle = rpc.rpc_sync("worker2", times_weight, (x,))
        loss = rpc.remote("worker1", sum_times_weight, (middle,))
        loss.backward(context_id, retain_graph=True)
        loss.backward(context_id)
        wanted = 2 * weight.detach() ** 2
        torch.testing.assert_close(dist_autograd.get_gradients(context_id)[x], wanted)
        for worker in ("worker1", "worker2"):
            gradient = rpc.rpc_sync(worker, gradient_of_weight, (context_id,))
            torch.testing.assert_close(gradient, 2 * x.detach() * weight.detach())


def sum_times_weight(x):
    return times_weight(x).sum()


def test_a_pass_from_a_local_reference_uses_its_context_or_grad(group):
    x, y = leaf(), leaf()
    with dist_autograd.context() as context_id:
        rpc.RRef(rpc.rpc_sync("worker1", times_weight, (x,)).sum()).backward(context_id)
        torch.testing.assert_close(dist_autograd.get_gradients(context_id)[x], weight.detach())
    assert x.grad is None
    rpc.RRef(y.pow(2).sum()).backward()
    torch.testing.assert_close(y.grad, 2 * y.detach())


def make_text():
    return "text"


def failing():
    raise KeyError("no loss")


@pytest.mark.parametrize("owner", ["worker0", "worker1"])
def test_a_reference_without_a_loss_cannot_start_a_pass(group, owner):
    with dist_autograd.context() as context_id:
        with pytest.raises(RuntimeError, match=f"RRef should contain a tensor for .backward\\(\\), on {owner}"):
            rpc.remote(owner, make_text).backward(context_id)
        with pytest.raises(RuntimeError, match="not a scalar"):
            rpc.remote(owner, times_weight, (leaf(),)).backward(context_id)
        with pytest.raises(RuntimeError, match="requires_grad not set on root 0"):
            rpc.remote(owner, torch.ones, ([1],)).backward(context_id)
        with pytest.raises(KeyError, match="no loss"):
            rpc.remote(owner, failing).backward(context_id)
    with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context_id}"):
        rpc.remote(owner, sum_times_weight, (leaf(),)).backward(context_id)


# --- futures ---


@rpc.functions.async_execution
def through(to, x):
    return rpc.rpc_async(to, times_weight, (x * 2,)).then(lambda future: future.wait() * weight)


def test_results_of_futures_are_recorded(group):
    with dist_autograd.context() as context_id:
        x, y = leaf(), leaf(2)
        futures = [rpc.rpc_async("worker1", through, ("worker2", leaf)) for leaf in (x, y)]
        first, second = torch.futures.wait_all(futures)
        kept = rpc.remote("worker1", through, ("worker2", x)).to_here()
        dist_autograd.backward(context_id, [(first * second + kept).sum()])

        x_, y_, here, there = (tensor.detach().requires_grad_() for tensor in (x, y, weight, weight))
        (x_ * 2 * here * there * (y_ * 2 * here * there) + x_ * 2 * here * there).sum().backward()
        gradients = dist_autograd.get_gradients(context_id)
        torch.testing.assert_close([gradients[x], gradients[y]], [x_.grad, y_.grad])
        torch.testing.assert_close(rpc.rpc_sync("worker1", gradient_of_weight, (context_id,)), here.grad)
        torch.testing.assert_close(rpc.rpc_sync("worker2", gradient_of_weight, (context_id,)), there.grad)


# --- DistributedDataParallel ---


def rows_of(rank):
    return torch.arange(6, dtype=torch.float64).reshape(2, 3) / 7 + rank


def model():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)]
    return torch.nn.Sequential(*layers).double()


def train_in_parallel(rank, folder):
    """Ranks 0 and 1 train; rank 2 applies the weight before and after their models."""
    if rank == 2:
        return None
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=2)
    parallel = torch.nn.parallel.DistributedDataParallel(model())
    results = []
    for _ in range(2):
        with dist_autograd.context() as context_id:
            embedded = rpc.rpc_sync("worker2", times_weight, (rows_of(rank),))
            loss = rpc.rpc_sync("worker2", times_weight, (parallel(embedded),)).sum()
            dist_autograd.backward(context_id, [loss])
            gradients = dist_autograd.get_gradients(context_id)
            assert all(parameter.grad is None for parameter in parallel.parameters())
            own = [gradients[parameter] for parameter in parallel.parameters()]
            results.append([*own, rpc.rpc_sync("worker2", gradient_of_weight, (context_id,))])
            results[-1] = [gradient.tolist() for gradient in results[-1]]
    dist.barrier()
    dist.destroy_process_group()
    return results


def test_data_parallel_models_have_their_mean_gradients_in_the_context():
    with tempfile.TemporaryDirectory() as folder:
        *trained, _ = run_ranks(train_in_parallel, 3, folder, start_method="forkserver", timeout=100)
    wanted = []
    for rank in range(2):
        local, local_weight = model(), leaf()
        (local(rows_of(rank) * local_weight) * local_weight).sum().backward()
        wanted.append(([parameter.grad for parameter in local.parameters()], local_weight.grad))
    mean = [(a + b) / 2 for a, b in zip(wanted[0][0], wanted[1][0], strict=True)]
    for rank, results in enumerate(trained):
        for result in results:
            gradients = [torch.tensor(gradient, dtype=torch.float64) for gradient in result]
            torch.testing.assert_close(gradients, [*mean, wanted[rank][1]])


# --- memory ---


def resident_bytes():
    """Without shared memory, since the pages of a ring become resident at their first use."""
    gc.collect()
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def train_steps(count):
    x = torch.ones(64, 64, requires_grad=True)
    for _ in range(count):
        with dist_autograd.context() as context_id:
            unused = rpc.rpc_sync("worker1", large_times_weight, (x,))
            loss = rpc.rpc_sync("worker1", large_times_weight, (x * 2,)).sum()
            dist_autograd.backward(context_id, [loss])
            assert len(dist_autograd.get_gradients(context_id)) == 1
            del unused


large_weight = torch.ones(64, 64, requires_grad=True)


def large_times_weight(x):
    return (x * large_weight).tanh()


@pytest.mark.timeout(400)
def test_memory_stops_growing_on_both_workers():
    # The allocator gets more memory when a thread first runs a function, which may happen late.
    sizes = []
    with workers(2):
        for _ in range(50):
            train_steps(200)
            sizes.append((resident_bytes(), rpc.rpc_sync("worker1", resident_bytes)))
            grown = [side[-1] - side[-6] for side in zip(*sizes, strict=True)] if len(sizes) > 5 else None
            if grown and max(grown) < 1 << 17:  # 131 bytes a pass; a leaked tensor of each pass would be 16 KiB
                return
    pytest.fail(f"still growing after 10,000 passes: {sizes}")
