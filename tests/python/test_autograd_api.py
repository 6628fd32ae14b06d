"""The Python side of torchrpc.autograd: names, the default mode, calls of the core. Other files test the gradients."""

import concurrent.futures
import types

import pytest

import torchrpc.autograd as dist_autograd

NAMES = (
    "DistAutogradContext _current_context _get_debug_info _get_max_id _init _is_valid_context _new_context "
    "_release_context _retrieve_context backward context get_gradients is_available"
)


@pytest.fixture
def core(monkeypatch):
    """Replaces the extension by a fake; returns the list of its calls."""
    asked = []
    new_context = types.SimpleNamespace(_context_id=lambda: 7, _release=lambda: asked.append(("released", 7)))
    fake = types.SimpleNamespace(
        backward=lambda *args: asked.append(args),
        _new_context=lambda: new_context,
    )
    monkeypatch.setattr(dist_autograd, "_extension", lambda: fake)
    return asked


@pytest.fixture
def default_mode():
    """Sets the default mode for one test."""
    yield dist_autograd.set_default_mode
    dist_autograd.set_default_mode(None)


def test_it_has_the_names_of_torchs_module():
    import torch.distributed.autograd as theirs

    assert set(theirs.__all__) <= set(dist_autograd.__all__)
    assert set(NAMES.split()) <= set(dir(dist_autograd)) & set(dir(theirs))
    with pytest.raises(AttributeError, match=r"'torchrpc.autograd' has no attribute 'nothing'"):
        dist_autograd.nothing  # noqa: B018


def test_nothing_of_the_extension_is_loaded_before_its_use(run_python):
    text = "import sys, torchrpc.autograd as a; a.context(); a.get_default_mode(); a._init(0); "
    assert run_python("-c", text + "print('torchrpc._C' in sys.modules)").stdout.strip() == "False"


def test_smart_is_the_default_mode_of_torchrpc(core, monkeypatch):
    monkeypatch.delenv("TORCHRPC_BACKWARD_MODE", raising=False)
    dist_autograd.backward(7, [])
    assert core == [(7, [], False, "smart")]


def test_smart_is_the_default_mode_where_torchrpc_replaces_torch(run_python):
    text = "import torchrpc; torchrpc.install(); import torch.distributed.autograd as a; print(a.get_default_mode())"
    assert run_python("-c", text).stdout.strip() == "smart"
    assert run_python("-c", text, env={"TORCHRPC_BACKWARD_MODE": "fast"}).stdout.strip() == "fast"


UNUSED_RESULT = """
import sys
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

rank = int(sys.argv[1])
options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + sys.argv[2], rpc_timeout=30)
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
if rank == 0:
    with dist_autograd.context() as context_id:
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        unused = rpc.rpc_sync("worker1", torch.add, (x, 1))
        rref = rpc.remote("worker1", torch.mul, (x, 3))
        unused_rref = rpc.remote("worker1", torch.mul, (x, 5))
        used = rref.to_here()
        dist_autograd.backward(context_id, [used.sum()])
        print(dist_autograd.get_gradients(context_id)[x].tolist())
rpc.shutdown()
"""


def test_a_script_for_torch_does_not_wait_for_results_that_its_loss_does_not_use(run_python, tmp_path):
    """In mode "fast" the pass fails after the time-out of thirty seconds."""
    script = tmp_path / "script.py"
    script.write_text(UNUSED_RESULT)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ranks = [
            pool.submit(run_python, script, str(rank), tmp_path / "store", env={"TORCHRPC_REPLACE": "1"})
            for rank in range(2)
        ]
    assert ranks[0].result().stdout.strip() == "[3.0, 3.0]"


def test_the_argument_overrides_the_default_which_overrides_the_environment(core, monkeypatch, default_mode):
    monkeypatch.setenv("TORCHRPC_BACKWARD_MODE", "FAST")
    dist_autograd.backward(1, [])
    default_mode("smart")
    dist_autograd.backward(2, [], True)
    dist_autograd.backward(3, [], retain_graph=True, mode="fast")
    assert core == [(1, [], False, "fast"), (2, [], True, "smart"), (3, [], True, "fast")]


def test_an_unknown_mode_is_refused(core, monkeypatch):
    choices = "must be one of 'fast', 'smart', but is 'quick'"
    with pytest.raises(ValueError, match=f"mode {choices}"):
        dist_autograd.backward(1, [], mode="quick")
    with pytest.raises(ValueError, match=f"mode {choices}"):
        dist_autograd.set_default_mode("quick")
    monkeypatch.setenv("TORCHRPC_BACKWARD_MODE", "quick")
    with pytest.raises(ValueError, match=f"TORCHRPC_BACKWARD_MODE {choices}"):
        dist_autograd.backward(1, [])
    assert core == []


def test_a_context_is_released_when_its_block_fails(core):
    with pytest.raises(KeyError), dist_autograd.context() as context_id:
        assert context_id == 7
        raise KeyError
    assert core == [("released", 7)]


def test_init_rpc_calls_init_of_autograd_with_the_rank(monkeypatch, tmp_path):
    from torchrpc import rpc

    ranks = []
    monkeypatch.setattr(dist_autograd, "_init", ranks.append)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    rpc.shutdown()
    assert ranks == [0]
