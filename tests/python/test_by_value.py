"""Functions and classes of an interactive session, which `python -c` is: they are sent by value."""

import subprocess
import sys
import textwrap

import pytest

import torchrpc.rpc as rpc
from torchrpc.rpc._security.allow_list import resolve
from torchrpc.rpc._values import by_value
from torchrpc.testing import workers

START = """
import dataclasses, enum, threading, time
import torch
import torchrpc
import torchrpc.rpc as rpc

factor = 3

def helper(x):
    return x * factor

def scaled(x):
    return helper(x) + 1

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
    def forward(self, x):
        return (x @ self.weight).item()

@dataclasses.dataclass
class Point:
    x: int
    y: torch.Tensor

class Color(enum.Enum):
    RED = 1

class OwnError(Exception):
    pass

def fail():
    raise OwnError("no")

async def later(x):
    return Point(x, torch.ones(1))

def countdown(n):
    return [n] + countdown(n - 1) if n else []
"""

CASES = {
    "a function that uses others and globals": ("rpc.rpc_sync('worker1', scaled, args=(2,))", "7"),
    "its current globals": ("rpc.rpc_sync('worker1', (globals().update(factor=5), scaled)[1], args=(2,))", "11"),
    "a recursive function": ("rpc.rpc_sync('worker1', countdown, args=(3,))", "[3, 2, 1]"),
    "a class behind an RRef": ("rpc.remote('worker1', Model).rpc_sync().forward(torch.ones(2))", "2.0"),
    "an instance that arrives": ("type(rpc.remote('worker1', Model).to_here()) is Model", "True"),
    "an argument and a result": (
        "(lambda p: (type(p) is Point, p.x, p.y.tolist()))(rpc.rpc_sync('worker1', lambda p: Point(p.x + 1, p.y * 2),"
        " args=(Point(1, torch.ones(2)),)))",
        "(True, 2, [2.0, 2.0])",
    ),
    "an enum": ("rpc.rpc_sync('worker1', lambda c: c, args=(Color.RED,)) is Color.RED", "True"),
    "a coroutine": ("rpc.rpc_sync('worker1', later, args=(4,)).x", "4"),
    "an object that is passed on": (
        "rpc.rpc_sync('worker1', lambda to, p: rpc.rpc_sync(to, lambda q: q.x, args=(p,)), args=('worker2',"
        " Point(8, None)))",
        "8",
    ),
    "a RemoteModule": (
        "__import__('torchrpc.nn').nn.RemoteModule('worker1', Model).forward(torch.ones(2))",
        "2.0",
    ),
    "tensors without a copy in the pickle": (
        "len(rpc.api._default_pickler.serialize(Point(1, torch.ones(100000)))[0]) < 4000",
        "True",
    ),
}


@pytest.fixture(scope="module")
def printed():
    """What a session prints, by case: one session evaluates all."""
    program = START + "with torchrpc.local_group(3):\n"
    program += textwrap.indent("\n".join(f"print({name!r}, '->', {text})" for name, (text, _) in CASES.items()), "    ")
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    return dict(line.split(" -> ") for line in run.stdout.splitlines())


@pytest.mark.parametrize("case", CASES)
def test_it_is_sent_by_value(printed, case):
    assert printed[case] == CASES[case][1]


def run_session(run_python, text):
    program = START + "with torchrpc.local_group(2):\n" + textwrap.indent(textwrap.dedent(text), "    ")
    return run_python("-c", program).stdout.splitlines()


def test_an_exception_of_the_session_is_caught_by_its_type(run_python):
    text = """
        try:
            rpc.rpc_sync("worker1", fail)
        except OwnError as error:
            print("caught", "OwnError('no')" in str(error))
    """
    assert run_session(run_python, text) == ["caught True"]


def test_a_global_that_cannot_be_sent_is_named(run_python):
    text = """
        lock = threading.Lock()
        def uses_lock():
            return lock
        try:
            rpc.rpc_sync("worker1", uses_lock)
        except rpc.SerializationError as error:
            print(error)
    """
    [line] = run_session(run_python, text)
    assert "Cannot send the function, because of the global variable 'lock' of uses_lock (a lock)," in line


def test_without_cloudpickle_the_error_says_to_install_it(run_python):
    text = """
        try:
            rpc.rpc_sync("worker1", scaled, args=(1,))
        except rpc.NameNotFoundError as error:
            print("Install cloudpickle on all workers (pip install cloudpickle)" in str(error))
    """
    hide = 'import sys; sys.modules["cloudpickle"] = None\n'
    program = hide + START + "with torchrpc.local_group(2):\n" + textwrap.indent(textwrap.dedent(text), "    ")
    assert run_python("-c", program).stdout.splitlines() == ["True"]


SERVER = """
import sys
import torchrpc.rpc as rpc

class Point:
    pass

options = rpc.TensorPipeRpcBackendOptions(init_method=sys.argv[1])
rpc.init_rpc("worker1", rank=1, world_size=2, rpc_backend_options=options)
rpc.shutdown()
"""
CLIENT = """
import sys
options = rpc.TensorPipeRpcBackendOptions(init_method=sys.argv[1])
rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options)
print(type(rpc.rpc_sync("worker1", Point, args=(1, torch.ones(1)))) is Point)
print(rpc.rpc_sync("worker1", lambda p: p.x, args=(Point(2, None),)))
rpc.shutdown()
"""


def test_a_script_returns_what_a_session_has_sent_to_it(tmp_path):
    """The script has a class of the same name, which the session's own is not."""
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    url = f"file://{tmp_path}/store"
    with subprocess.Popen([sys.executable, script, url]) as server:
        session = subprocess.run(
            [sys.executable, "-c", START + CLIENT, url], capture_output=True, text=True, timeout=60
        )
        assert session.stdout.splitlines() == ["True", "2"], session.stderr
        assert server.wait(30) == 0


def test_a_worker_with_an_allow_list_refuses_it_and_does_not_advise_a_hole(monkeypatch):
    monkeypatch.setattr(by_value, "_has_arrived", True)  # as in a worker that has received one
    dynamic = type("Dynamic", (), {"__module__": "__main__"})
    with workers(2, allowed_functions=[len]):
        with pytest.raises(rpc.SerializationError, match="has no name at the top level of a module") as e:
            rpc.rpc_sync("worker1", len, ([dynamic],))
        assert "cloudpickle." not in str(e.value)
        with pytest.raises(rpc.NotAllowedError, match=r"worker1 does not let others run or send __main__\.Dynamic"):
            rpc.rpc_sync("worker1", len, ([dynamic()],))


@pytest.mark.parametrize(
    "entry", ["cloudpickle.loads", "cloudpickle.cloudpickle._make_function", "cloudpickle.*", "clo*"]
)
def test_an_allow_list_may_not_have_cloudpickle(entry):
    with pytest.raises(ValueError, match=r"parts of cloudpickle itself, .* by which they can run any code"):
        resolve([entry])
