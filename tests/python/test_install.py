"""Replacing torch.distributed.rpc and the modules that use it: by install(), the environment and `python -m torchrpc`,
also in child processes.
"""

import re
import textwrap

import pytest

WHICH = """
def which():
    import sys, torch, torch.distributed.rpc as rpc
    ours = sys.modules.get("torchrpc.rpc")
    return "torchrpc" if rpc is ours and torch.distributed.rpc is ours else "torch"
"""

CHILDREN = (
    WHICH
    + """
import multiprocessing, os, subprocess, sys

def report(queue):
    queue.put(which())

def child(method):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=report, args=(queue,))
    process.start()
    value = queue.get(timeout=60)
    process.join()
    return value

if __name__ == "__main__":
    if sys.argv[1:] == ["sub"]:
        print(which())
    else:
        print("self", which())
        for method in ("spawn", "fork", "forkserver"):
            print(method, child(method))
        print("subprocess", subprocess.check_output([sys.executable, __file__, "sub"], text=True).strip())
        pid = os.fork()
        if pid == 0:
            print("os.fork", which(), flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
"""
)
EVERYWHERE = ["self", "spawn", "fork", "forkserver", "subprocess", "os.fork"]

CALLS = """
import os, sys
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch.distributed.rpc import RRef, rpc_sync
from torch.distributed.rpc.api import _all_gather
import torch.distributed.rpc.internal as internal

class Box:
    def __init__(self, value):
        self.value = value
    def get(self):
        return self.value

def twice(x):
    return 2 * x

def run(rank):
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        k = 3
        rref = rpc.remote("worker1", Box, args=(5,))
        print(type(rref).__module__, internal.__name__, rpc_sync("worker1", twice, (4,)),
              rpc_sync("worker1", lambda x: twice(x) + k, (4,)), rref.rpc_sync().get(), isinstance(rref, rpc.PyRRef),
              type(rref) is torch._C._distributed_rpc.PyRRef, RRef[int].__origin__ is RRef)
    assert _all_gather(rank) == {"worker0": 0, "worker1": 1}
    rpc.shutdown()

if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ["MASTER_PORT"] = sys.argv[1]
    mp.start_processes(run, nprocs=2, start_method=sys.argv[2])
"""
CALLED = "8 11 5 True True True"


@pytest.fixture
def script(tmp_path):
    def write(text, name="script.py"):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return name

    return write


def implementations(output):
    return dict(line.split() for line in output.splitlines())


def test_nothing_is_replaced_without_a_request(run_python, script):
    assert set(implementations(run_python(script(CHILDREN)).stdout).values()) == {"torch"}
    result = run_python("-c", WHICH + "import torchrpc.rpc; torchrpc.rpc.rpc_sync; print(which())")
    assert result.stdout.strip() == "torch"


def test_the_environment_replaces_in_every_process(run_python, script):
    output = implementations(run_python(script(CHILDREN), env={"TORCHRPC_REPLACE": "1"}).stdout)
    assert output == {name: "torchrpc" for name in EVERYWHERE}


def test_the_launcher_replaces_in_every_process(run_python, script):
    output = implementations(run_python("-m", "torchrpc", script(CHILDREN)).stdout)
    assert output == {name: "torchrpc" for name in EVERYWHERE}


@pytest.mark.parametrize("value", ["0", "", "false", "no"])
def test_the_environment_can_disable_the_replacement(run_python, value):
    assert run_python("-c", WHICH + "print(which())", env={"TORCHRPC_REPLACE": value}).stdout.strip() == "torch"


@pytest.mark.timeout(240)
def test_install_affects_this_process_and_its_forked_children(run_python, script):
    text = CHILDREN.replace('print("self"', 'import torchrpc; torchrpc.install(); torchrpc.install(); print("self"')
    output = implementations(run_python(script(text)).stdout)
    assert {name for name, which in output.items() if which == "torchrpc"} == {"self", "fork", "os.fork"}
    above = run_python(script("import torchrpc\ntorchrpc.install()\n" + CHILDREN)).stdout
    assert {name for name, which in implementations(above).items() if which == "torchrpc"} == set(EVERYWHERE)


def test_torchrun_passes_the_replacement_to_its_workers(run_python, script):
    # The workers share an output without a buffer: each writes its line at once.
    name = script(WHICH + "import os; os.write(1, f'{which()} of rank\\n'.encode())")
    run = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", name]
    assert run_python(*run, env={"TORCHRPC_REPLACE": "1"}).stdout.split("\n")[:2] == ["torchrpc of rank"] * 2


def test_the_launcher_preserves_the_environment_of_a_script(run_python, script, tmp_path):
    text = "import sys, __main__; print(sys.argv, sys.path[0], __name__, __main__.__file__, sys.flags.dev_mode)"
    (tmp_path / "folder").mkdir()
    name = script(text, "folder/script.py")
    plain = run_python("-X", "dev", name, "-x", "--flag", "a b").stdout
    for how in (["-m", "torchrpc"], ["-mtorchrpc"], ["-um", "torchrpc"]):
        assert run_python("-X", "dev", *how, name, "-x", "--flag", "a b").stdout == plain
    module = run_python("-m", "folder.script", "1").stdout
    assert run_python("-m", "torchrpc", "-m", "folder.script", "1").stdout == module


def test_the_launcher_prints_its_usage(run_python):
    assert "usage: python -m torchrpc" in run_python("-m", "torchrpc", "-h").stdout
    assert re.fullmatch(r"torchrpc \d\S*, torch \d\S*\n", run_python("-m", "torchrpc", "--version").stdout)
    result = run_python("-m", "torchrpc", check=False)
    assert result.returncode == 2 and "usage: python -m torchrpc" in result.stderr
    result = run_python("-m", "torchrpc", "x.py", env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, check=False)
    assert result.returncode == 1 and "Unset it" in result.stderr


def test_the_exit_status_is_the_scripts(run_python, script):
    assert run_python("-m", "torchrpc", script("raise SystemExit(7)"), check=False).returncode == 7


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_an_unchanged_script_runs(run_python, script, method):
    from torchrpc.testing import free_port

    output = run_python("-m", "torchrpc", script(CALLS), free_port(), method).stdout
    assert output.strip() == f"torchrpc._C torchrpc.rpc.internal {CALLED}"


def test_the_same_script_still_runs_on_torch(run_python, script):
    from torchrpc.testing import free_port

    text = CALLS.replace('rpc_sync("worker1", lambda x: twice(x) + k, (4,))', "11")
    output = run_python(script(text), free_port(), "spawn").stdout
    assert output.strip() == f"torch._C._distributed_rpc torch.distributed.rpc.internal {CALLED}"


TORCHS_OWN_USE = """
import sys
import torchrpc
torchrpc.install()
import torch
assert "torchrpc._C" not in sys.modules, "the extension was loaded too early"
import torch.distributed.rpc as rpc
from torch.distributed.rpc import RRef
from torch._jit_internal import is_rref
import torch.nn.parallel.distributed as ddp, torch.jit.annotations as annotations
assert RRef is rpc.RRef is ddp.RRef is annotations.RRef and RRef.__module__ == "torchrpc.rpc.api"
assert is_rref(RRef[int])

@torch.jit.script
def fetch(rref: RRef[torch.Tensor]) -> torch.Tensor:
    return rref.to_here()

import torch._C._distributed_rpc as bindings
assert bindings is torchrpc._C is torch._C._distributed_rpc
import torch.distributed.rpc.backend_registry as registry
assert registry is sys.modules["torchrpc.rpc.backend_registry"] and registry.__spec__.name == registry.__name__
from torch.distributed.rpc import *
assert init_rpc is rpc.init_rpc and rpc_async is rpc.api.rpc_async
import torch.distributed.autograd as dist_autograd
assert dist_autograd is torchrpc.autograd is torch._C._distributed_autograd and dist_autograd.is_available()
try:
    import torch.distributed.rpc.nothing
except ModuleNotFoundError:
    print("ok")
"""


def test_torch_itself_uses_the_replacement(run_python, script):
    assert run_python(script(TORCHS_OWN_USE)).stdout.strip() == "ok"


LATER = """
import sys, torch
{before}
import torchrpc
torchrpc.install()
{between}
from torch.distributed.optim import DistributedOptimizer, ZeroRedundancyOptimizer
from torch.distributed.nn import RemoteModule
import torch.distributed.optim.optimizer as optimizer
import torch.distributed.nn.api.remote_module as remote_module
import torch.distributed.nn.functional as functional
print(DistributedOptimizer is torchrpc.optim.DistributedOptimizer is optimizer.DistributedOptimizer
          is torch.distributed.optim.DistributedOptimizer,
      RemoteModule is torchrpc.nn.RemoteModule is remote_module.RemoteModule is torch.distributed.nn.RemoteModule,
      remote_module._RemoteModule.__module__, torch.distributed.optim.optimizer is optimizer,
      ZeroRedundancyOptimizer.__module__, functional.__name__)
"""
REPLACED = (
    "True True torchrpc.nn.remote_module True torch.distributed.optim.zero_redundancy_optimizer "
    "torch.distributed.nn.functional"
)
LOADED = "assert ('torch.distributed.optim' in sys.modules) is ('torch.distributed.nn' in sys.modules) is {}"


@pytest.mark.parametrize("first", ["optim", "nn", "optim.optimizer", "nn.api.remote_module", "nn.functional"])
def test_modules_that_torch_imports_late_are_replaced(run_python, script, first):
    between = LOADED.format(False) + f"\nimport torch.distributed.{first}"
    assert run_python(script(LATER.format(before="", between=between))).stdout.strip() == REPLACED


def test_modules_that_are_imported_already_are_replaced(run_python, script):
    before = "import torch.distributed.optim, torch.distributed.nn"
    text = LATER.format(before=before, between=LOADED.format(True))
    assert run_python(script(text)).stdout.strip() == REPLACED


def test_without_install_torchs_modules_remain(run_python):
    run_python(
        "-c",
        """if True:
        import torchrpc.nn, torchrpc.autograd, torch.distributed.nn, torch.distributed.autograd
        assert torchrpc.nn.RemoteModule is not torch.distributed.nn.RemoteModule
        assert torchrpc.autograd.context is not torch.distributed.autograd.context
        """,
    )


def test_the_bindings_are_forwarded_until_they_are_loaded(run_python):
    run_python(
        "-c",
        """if True:
        import torchrpc; torchrpc.install()
        from torch._C._distributed_rpc import PyRRef
        import torchrpc._C
        assert PyRRef is torchrpc._C.PyRRef
        """,
    )


def test_install_starts_no_thread(run_python):
    threads = "import os, torchrpc, torch; torchrpc.install(); torch.distributed.rpc.rpc_sync"
    alone = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # numpy starts threads
    output = run_python("-c", threads + "; print(len(os.listdir('/proc/self/task')))", env=alone).stdout
    assert output.strip() == "1"


CONFLICT = """
import tempfile, torch, torch.distributed.rpc as rpc
options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tempfile.mkdtemp()}/s")
rpc.init_rpc("w", rank=0, world_size=1, rpc_backend_options=options)
import torchrpc
try:
    torchrpc.install()
except RuntimeError as exc:
    print(exc)
rpc.shutdown()
torchrpc.install()
import torch.distributed.rpc as now
print(now.__name__)
"""


def test_a_conflict_with_torchs_own_rpc_is_an_error(run_python):
    first, second = run_python("-c", CONFLICT).stdout.strip().split("\n")
    assert "torch's own RPC is already initialised in this process" in first and "before init_rpc" in first
    assert second == "torchrpc.rpc"


@pytest.fixture
def without_extension(tmp_path, hook_path):
    """A copy of the package without its binaries."""
    import importlib.util
    import os
    import shutil
    from pathlib import Path

    source = Path(importlib.util.find_spec("torchrpc").origin).parent
    shutil.copytree(source, tmp_path / "bare" / "torchrpc", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path / "bare"), hook_path["PYTHONPATH"]])}


def test_an_impossible_replacement_is_an_error(run_python, without_extension):
    assert run_python("-c", "import torch", env=without_extension).stderr == ""
    result = run_python("-c", "import torch", env={**without_extension, "TORCHRPC_REPLACE": "1"}, check=False)
    assert result.returncode == 1 and "its extension torchrpc._C is not built" in result.stderr


def test_a_plain_import_of_torch_loads_only_the_hook(run_python):
    loaded = run_python("-c", "import torch, sys; print(*sorted(m for m in sys.modules if 'torchrpc' in m))").stdout
    assert loaded.split() == ["torchrpc", "torchrpc._autoload"]


def test_an_import_of_torchrpc_loads_no_torch(run_python):
    assert run_python("-c", "import torchrpc, sys; print('torch' in sys.modules)").stdout.strip() == "False"


def test_an_import_of_torchrpc_rpc_loads_the_extension_on_first_use_only(run_python):
    text = "import torchrpc.rpc as rpc, sys; a = 'torchrpc._C' in sys.modules; rpc.rpc_sync; "
    assert run_python("-c", text + "print(a, 'torchrpc._C' in sys.modules)").stdout.strip() == "False True"


@pytest.mark.parametrize("name", ["internal", "backend_registry", "rref_proxy"])
def test_a_submodule_may_be_imported_first(run_python, name):
    run_python("-c", f"import torchrpc.rpc.{name}; import torchrpc.rpc; torchrpc.rpc.init_rpc")


def test_a_torch_without_rpc_gets_one(run_python):
    run_python(
        "-c",
        """if True:
        import torch, sys
        del torch._C._rpc_init, torch._C._dist_autograd_init  # as it is where torch was built without RPC
        from torchrpc._autoload import autoload
        autoload()
        import torch.distributed.rpc as rpc, torch.distributed.autograd as dist_autograd
        assert rpc is sys.modules["torchrpc.rpc"] and rpc.is_available()
        assert dist_autograd is sys.modules["torchrpc.autograd"]
        from torch.distributed.optim import DistributedOptimizer
        from torch.distributed.nn import RemoteModule
        assert RemoteModule.__module__.startswith("torchrpc.")
        """,
    )


SEED = """
import os, torch
import torch.distributed.rpc as rpc
from torch.distributed.rpc import RRef
import multiprocessing

class Server:
    def __init__(self):
        self.total = torch.zeros(2)

    @staticmethod
    @rpc.functions.async_execution
    def later(x):
        future = torch.futures.Future()
        future.set_result(x + 1)
        return future

    def add(self, gradients):
        for value in gradients.values():
            self.total += value
        return True

server = None

def run(role, rank):
    global server
    rpc.init_rpc(name=role, rank=rank, world_size=2, rpc_backend=rpc.Backend.TENSORPIPE)
    if role == "ps":
        server = RRef(Server())
    else:
        import time
        while (ps := rpc.rpc_sync("ps", lambda: server)) is None:
            time.sleep(0.01)  # the user's program, which is under test, polls
        pushed = rpc.rpc_async("ps", lambda rref, g: rref.local_value().add(g), args=(ps, {"w": torch.ones(2)}))
        print(pushed.wait(), ps.rpc_sync().later(1), ps.to_here().total.tolist())
    rpc.shutdown()

if __name__ == "__main__":
    import sys
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", sys.argv[1]
    ranks = [multiprocessing.Process(target=run, args=a) for a in (("ps", 0), ("worker", 1))]
    [p.start() for p in ranks]
    [p.join() for p in ranks]
    sys.exit(max(p.exitcode for p in ranks))
"""


def test_the_article_on_parameter_servers_has_its_spelling(run_python, script):
    from torchrpc.testing import free_port

    output = run_python("-m", "torchrpc", script(SEED), free_port()).stdout
    assert output.strip() == "True 2 [1.0, 1.0]"


WITHOUT_RPC = """
import importlib.machinery, sys

load = importlib.machinery.ExtensionFileLoader.exec_module

def load_without_rpc(self, module):
    load(self, module)
    if module.__name__ == "torch._C":
        for name in ("_rpc_init", "_dist_autograd_init", "_faulty_agent_init"):
            delattr(module, name)

importlib.machinery.ExtensionFileLoader.exec_module = load_without_rpc

import torch
import torch.distributed.rpc as rpc
import torch.distributed.autograd as dist_autograd
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer

def train(module, optimizer):
    with dist_autograd.context() as context_id:
        loss = module.forward(torch.ones(1, 2)).sum()
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    return loss.item()

@torch.jit.script
def same(rref: rpc.RRef[torch.Tensor]) -> rpc.RRef[torch.Tensor]:
    return rref

options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + sys.argv[1])
rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
module = RemoteModule("worker0/cpu", torch.nn.Linear, (2, 2))
optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.1)
print(sys.modules["torchrpc.rpc"] is rpc, train(module, optimizer) > train(module, optimizer))
rpc.shutdown()
"""


def test_a_torch_without_rpc_has_ours(run_python, script, tmp_path):
    assert run_python(script(WITHOUT_RPC), tmp_path / "store").stdout.strip() == "True True"
