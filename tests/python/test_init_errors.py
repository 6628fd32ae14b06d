"""Errors of init_rpc: they name worker, argument and remedy, and leave no state behind."""

import os
import socket
import subprocess
import sys
import time

import pytest
import torch
from waiting import eventually

import torchrpc.rpc as rpc
from torchrpc.testing import RankError, free_port, run_ranks

OPTIONS = rpc.TensorPipeRpcBackendOptions


def init(name="worker0", rank=0, world_size=1, **options):
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=OPTIONS(**options) if options else None)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    left = rpc._is_current_rpc_agent_set()
    if left:
        rpc.shutdown(graceful=False)
    assert not left, "an agent was left behind"


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(monkeypatch, missing):
    present = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}
    del present[missing]
    for name, value in present.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"environment variable {missing} expected, but not set\. Set MASTER_ADDR"):
        init()


def test_a_missing_rank_is_named(tmp_path):
    for method, text in [
        ("env://", "environment variable RANK expected"),
        ("tcp://127.0.0.1:23456", "rank parameter missing"),
        (f"file://{tmp_path}/store", "rank parameter missing"),
    ]:
        for world_size in (None, 2):
            with pytest.raises(ValueError, match=text):
                init(rank=-1, world_size=world_size, init_method=method)


@pytest.mark.parametrize("port", ["http", "0", "70000", "-1"])
def test_a_port_that_is_none_is_named(monkeypatch, port):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ValueError, match=f"must be a number from 1 to 65535, but is '{port}'"):
        init()


@pytest.mark.parametrize("address", ["::1:29500", "localhost:99999", "localhost:http"])
def test_a_url_whose_port_is_none_is_named_with_its_form(address):
    with pytest.raises(rpc.RendezvousError, match=rf"tcp://{address}\. Write tcp://host:port, .*\[::1\]"):
        init("worker1", rank=1, world_size=2, init_method=f"tcp://{address}")


@pytest.mark.parametrize("url", ["abc", "http://host:80"])
def test_what_is_no_url_of_a_meeting_place_is_shown_with_the_forms(url):
    options = rpc.TensorPipeRpcBackendOptions(init_method=url)
    with pytest.raises(rpc.RendezvousError, match=rf"init_method must be .* tcp://host:port.* but is '{url}'"):
        rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)


def test_an_address_without_a_listener_is_named(monkeypatch):
    monkeypatch.setenv("TORCHRPC_INIT_TIMEOUT", "0.5")
    port = free_port()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"rank 1 found nobody at 127\.0\.0\.1:{port}.*MASTER_ADDR.*INIT_TIMEOUT"):
        init("worker1", rank=1, world_size=2, init_method=f"tcp://127.0.0.1:{port}")
    assert time.monotonic() - start < 20


def test_a_host_that_does_not_exist_is_named(monkeypatch):
    monkeypatch.setenv("TORCHRPC_INIT_TIMEOUT", "0.5")
    with pytest.raises(RuntimeError, match=r"rank 1 found nobody at no-such-host\.invalid:1234"):
        init("worker1", rank=1, world_size=2, init_method="tcp://no-such-host.invalid:1234")


def test_a_worker_that_starts_before_rank_0_goes_on_soon_after_that():
    """The client of torch's TCPStore may pause for 51 seconds after a refused connection."""
    port = free_port()
    joined = run_ranks(join_with_late_rank_0, 2, port, start_method="forkserver", init=False)
    assert joined[1] - joined[0] < 10


def join_with_late_rank_0(rank, port):
    if rank == 0:
        time.sleep(3)  # rank 0 comes late
    start = time.monotonic()
    init(f"worker{rank}", rank, 2, init_method=f"tcp://127.0.0.1:{port}")
    rpc.shutdown()
    return start if rank == 0 else time.monotonic()


WAIT_FOR_NAME = r"""
import threading
import torchrpc.rpc
from torchrpc._C import _wait_for_name
from torchrpc.rpc._group import rendezvous

def add_name():
    with open("/etc/hosts", "a") as hosts:
        hosts.write("127.0.0.1 late-host.invalid\n")

assert _wait_for_name("late-host.invalid", 0.2) != ""
threading.Timer(1, add_name).start()
assert _wait_for_name("late-host.invalid", 60) == ""
"""


def test_a_name_that_has_no_address_at_first_is_waited_for(tmp_path):
    """In a mount namespace, whose /etc/hosts is the test's own."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    in_namespace = ["unshare", "--mount", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh"]
    if subprocess.run([*in_namespace, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs the right to make a mount namespace")
    done = subprocess.run(
        [*in_namespace, sys.executable, "-c", WAIT_FOR_NAME], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


DYING_STORE = """
import datetime, os, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
store.wait(["rpc_prefix_0/worker/1"], datetime.timedelta(seconds=60))  # the record of the worker of rank 1
os._exit(0)
"""


def test_a_store_that_ends_while_the_group_forms_is_named_with_its_address_and_without_a_stack():
    with subprocess.Popen([sys.executable, "-c", DYING_STORE], stdout=subprocess.PIPE, text=True) as server:
        address = f"127.0.0.1:{int(server.stdout.readline())}"
        with pytest.raises(rpc.RendezvousError) as caught:
            init(name="worker1", rank=1, world_size=2, init_method=f"tcp://{address}")
    text = str(caught.value)
    assert f"Rank 0, which serves it at {address}, has ended or cannot be reached" in text and "worker1" in text
    assert "frame #" not in text and "Exception raised from" not in text


def test_a_store_that_ends_before_the_group_is_found_is_named(monkeypatch, tmp_path):
    def fails(*args):
        raise torch.distributed.DistNetworkError("Broken pipe")

    monkeypatch.setattr("torchrpc.rpc._group.init.enter_group", fails)
    with pytest.raises(
        rpc.RendezvousError, match=r"worker0: .* does not answer: Broken pipe\. The process that serves"
    ):
        init(init_method=f"file://{tmp_path}/store")


def test_a_port_in_use_is_named():
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(
            RuntimeError, match=rf"rank 0 cannot serve the group's store at 127\.0\.0\.1:{port}.*in use"
        ):
            init(init_method=f"tcp://127.0.0.1:{port}")


def test_an_init_timeout_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("TORCHRPC_INIT_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="TORCHRPC_INIT_TIMEOUT must be a number of seconds, but is 'soon'"):
        init(init_method=f"tcp://127.0.0.1:{free_port()}")


@pytest.mark.parametrize("seconds", ["-1", "nan"])
def test_an_init_timeout_below_zero_is_refused(monkeypatch, seconds):
    monkeypatch.setenv("TORCHRPC_INIT_TIMEOUT", seconds)
    with pytest.raises(ValueError, match="TORCHRPC_INIT_TIMEOUT must not be negative"):
        init(init_method=f"tcp://127.0.0.1:{free_port()}")


@pytest.mark.parametrize("seconds", [float("inf"), 1e15, 1e300, 0])
def test_a_timeout_may_be_as_long_as_a_float_can_say(tmp_path, monkeypatch, seconds):
    monkeypatch.setenv("TORCHRPC_INIT_TIMEOUT", str(seconds))
    init(init_method=f"file://{tmp_path}/store", rpc_timeout=seconds)
    try:
        assert rpc.get_rpc_timeout() == 0
        assert rpc.rpc_sync("worker0", torch.add, args=(torch.ones(1), 1), timeout=seconds).item() == 2
        assert rpc.rpc_async("worker0", torch.add, args=(torch.ones(1), 1), timeout=seconds).wait().item() == 2
        assert rpc.remote("worker0", torch.add, args=(torch.ones(1), 1), timeout=seconds).to_here(seconds).item() == 2
    finally:
        rpc.shutdown()


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_default_timeout_below_zero_is_refused(tmp_path, seconds):
    with pytest.raises(ValueError, match="rpc_timeout must not be negative"):
        init(init_method=f"file://{tmp_path}/store", rpc_timeout=seconds)


def test_a_file_in_no_directory_is_named_at_once(tmp_path):
    start = time.monotonic()
    with pytest.raises(ValueError, match=rf"file:// rendezvous: {tmp_path}/none is not a directory\. Make it"):
        init(init_method=f"file://{tmp_path}/none/store")
    with pytest.raises(ValueError, match=rf"{tmp_path} is a directory\. Add the name of a new file"):
        init(init_method=f"file://{tmp_path}")
    (tmp_path / "link").symlink_to(tmp_path / "none" / "target")
    with pytest.raises(ValueError, match=f"{tmp_path}/link cannot be opened: No such file"):
        init(init_method=f"file://{tmp_path}/link")
    with pytest.raises(ValueError, match="cannot be opened: File name too long"):
        init(init_method=f"file://{tmp_path}/{'x' * 300}")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"name": 5}, RuntimeError, "Argument name=5 must be of type"),
        ({"name": ""}, RuntimeError, "must be non-empty"),
        ({"name": "a b"}, RuntimeError, "Worker name must match"),
        ({"name": "x" * 128}, RuntimeError, "shorter than 128"),
        ({"rank": "0"}, RuntimeError, "Argument rank='0' must be of type"),
        ({"rank": True}, RuntimeError, "Argument rank=True must be of type"),
        ({"rank": -2}, ValueError, "w: rank must be from 0 to 1, as world_size is 2, but is -2"),
        ({"rank": 2}, ValueError, "w: rank must be from 0 to 1, as world_size is 2, but is 2"),
        ({"world_size": "2"}, RuntimeError, "Argument world_size='2' must be of type"),
        ({"world_size": -1}, ValueError, "w: world_size must be at least 1, but is -1"),
        (
            {"world_size": 0},
            ValueError,
            "w: world_size must be at least 1, but is 0. Leave it out for a group that grow",
        ),
        ({"world_size": 10**6}, ValueError, "w: a group has at most 32768 workers, but world_size is 1000000"),
        ({"world_size": 10**12}, ValueError, "w: a group has at most 32768 workers, but world_size is 1000000000000"),
        ({"world_size": None, "rank": 32768}, ValueError, "w: a group has at most 32768 workers, but rank is 32768"),
        ({"backend": "TENSORPIPE"}, TypeError, "Argument backend must be a member of BackendType"),
        ({"rpc_backend": 5}, TypeError, "Argument backend must be a member of BackendType"),
        (
            {"rpc_backend_options": {}},
            TypeError,
            "Argument rpc_backend_options must be an instance of RpcBackendOptions",
        ),
        ({"rpc_backend_options": rpc.RpcBackendOptions()}, TypeError, "Could not infer backend for options"),
    ],
)
def test_arguments_are_checked_before_anything_is_done(arguments, kind, text):
    with pytest.raises(kind, match=text):
        rpc.init_rpc(**{"name": "w", "rank": 0, "world_size": 2, **arguments})


def test_options_of_another_backend_are_refused(tmp_path):
    options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/store")
    with pytest.raises(TypeError, match="`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`"):
        rpc.init_rpc("w", backend=rpc.BackendType.TENSORPIPE, rank=0, world_size=1, rpc_backend_options=options)


def test_calls_before_init_rpc_raise_an_error():
    for call in (
        lambda: rpc.rpc_sync("worker1", len, ("x",)),
        lambda: rpc.rpc_async("worker1", torch.add, (1, 2)),
        lambda: rpc.remote("worker1", len, ("x",)),
        lambda: rpc.get_worker_info(),
        lambda: rpc.shutdown(),
        lambda: rpc.api._all_gather(1),
    ):
        with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
            call()
    with pytest.raises(RuntimeError, match="Current RPC agent is not set! Did you initialize the RPC framework"):
        rpc.RRef(1)


def test_a_group_of_one_works_and_cannot_be_joined_twice(tmp_path):
    init(init_method=f"file://{tmp_path}/store")
    try:
        assert rpc.rpc_sync("worker0", len, ("abc",)) == 3
        with pytest.raises(RuntimeError, match="is already initialized"):
            init(init_method=f"file://{tmp_path}/store")
        with pytest.raises(RuntimeError, match="is already initialized"):
            init(init_method=f"tcp://127.0.0.1:{free_port()}")
    finally:
        rpc.shutdown()


def errors_of(rank, names, sizes, ranks=None):
    """Return the text of init_rpc's error on this rank, or None."""
    try:
        rpc.init_rpc(names[rank], rank=(ranks or range(9))[rank], world_size=sizes[rank])
    except Exception as exc:
        assert not rpc._is_current_rpc_agent_set()
        return f"{type(exc).__name__}: {exc}"
    rpc.shutdown()
    return None


def errors_of_all(*args):
    return run_ranks(errors_of, len(args[0]), *args, start_method="forkserver", init=False, timeout=60)


def test_a_duplicate_name_is_reported_on_all_ranks():
    start = time.monotonic()
    for text in errors_of_all(["a", "b", "a"], [3, 3, 3]):
        assert text.startswith("RendezvousError") and "name a is not unique" in text and "ranks 0 and 2" in text
    assert time.monotonic() - start < 30


def test_different_world_sizes_are_reported_on_all_ranks():
    start = time.monotonic()
    for text in errors_of_all(["a", "b"], [2, 3]):
        assert text.startswith("RendezvousError") and "world" in text and "2" in text and "3" in text
    assert time.monotonic() - start < 30


def only_rank_1_of_two(rank):
    os.environ["TORCHRPC_INIT_TIMEOUT"] = "1"
    return errors_of(rank, ["a", "b"], [2, 2])


def test_a_missing_worker_is_named():
    (text,) = run_ranks(only_rank_1_of_two, 1, start_method="forkserver", init=False)
    assert text.startswith("RendezvousError") and "missing: rank 1" in text and "a (rank 0)" in text


def mixed_kinds(rank):
    """Start a group of one with a world size, then a worker without a world size."""
    options = OPTIONS(init_method=f"file://{os.environ['STORE']}")
    if rank == 0:
        rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=options)
        open(os.environ["STORE"] + ".up", "w").close()
        eventually(lambda: os.path.exists(os.environ["STORE"] + ".tried"))
        rpc.shutdown()
        return None
    eventually(lambda: os.path.exists(os.environ["STORE"] + ".up"))
    try:
        rpc.init_rpc("b", rank=1, rpc_backend_options=options)
    except RuntimeError as exc:
        return str(exc)
    finally:
        open(os.environ["STORE"] + ".tried", "w").close()


def test_groups_with_and_without_world_size_do_not_mix(tmp_path):
    env = {"STORE": str(tmp_path / "store")}
    _, text = run_ranks(mixed_kinds, 2, start_method="forkserver", init=False, env=env)
    assert "RPC group mixes statically and dynamically initialized members which is not supported" in text


def test_a_size_in_the_environment_that_is_none_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="WORLD_SIZE must be a number of workers, but is 'two'"):
        rpc.init_rpc("w", rank=0)


def test_the_limit_of_the_start_bounds_all_its_waits(tmp_path, monkeypatch):
    """Two of three workers come: they wait for the third for the whole time, and for nothing after it."""
    monkeypatch.setenv("TORCHRPC_INIT_TIMEOUT", "6")
    begin = time.monotonic()
    with pytest.raises(RankError, match="missing: rank 2"):
        run_ranks(join_two_of_three, 2, f"file://{tmp_path}/store", init=False)
    assert time.monotonic() - begin < 30  # with the start of the processes


def join_two_of_three(rank, url):
    begin = time.monotonic()
    try:
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=OPTIONS(init_method=url))
    finally:
        assert time.monotonic() - begin < 11  # two such waits would take 12


def test_a_second_worker_of_rank_0_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    [first, second] = run_ranks(be_rank_0, 2, tmp_path / "refused", init=False)
    assert sorted([first, second])[0] == "ok"
    assert "rank 0 cannot serve the group's store" in first + second
    assert "Is another worker of rank 0 running (each worker needs a rank of its own)" in first + second


def be_rank_0(_, refused):
    try:
        rpc.init_rpc("worker0", rank=0, world_size=1)
    except rpc.RendezvousError as error:
        refused.touch()
        return str(error)
    eventually(refused.exists)
    rpc.shutdown()
    return "ok"


def join_after_refusal(rank, url, world_size):
    """Be refused because of the device map of rank 0, then join without it; what was raised, and the group's size."""
    options = OPTIONS(init_method=url)
    if rank == 0:
        options.set_device_map("worker0", {"cuda:0": "cuda:100"})
    text = ""
    try:
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    except ValueError as error:
        text = str(error)
    options = OPTIONS(init_method=url)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    size = len(rpc.api.get_workers())
    rpc.shutdown()
    return text, size


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_workers_whose_devices_were_refused_may_try_again(tmp_path, kind):
    url = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"file://{tmp_path}/store"
    for text, size in run_ranks(join_after_refusal, 2, url, 2, start_method="forkserver", init=False, timeout=60):
        assert text.startswith("Node worker0 has source devices with invalid indices in its device map for worker0")
        assert size == 2
    url = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"file://{tmp_path}/growing"
    (growing,) = run_ranks(join_after_refusal, 1, url, None, start_method="forkserver", init=False, timeout=60)
    assert "device map for worker0" in growing[0] and growing[1] == 1


NO_DESCRIPTORS = """
import os, resource, sys, torch, torchrpc.rpc as rpc

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    for descriptor in held[: int(sys.argv[1])]:
        os.close(descriptor)
try:
    options = rpc.TensorPipeRpcBackendOptions(init_method=sys.argv[2])
    rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
except rpc.RendezvousError as error:
    print(error)
os._exit(0)  # torch's file store ends the process if it cannot open its file
"""


@pytest.mark.parametrize("left", [1, 2, 5])
def test_init_rpc_without_descriptors_is_an_error_with_the_remedy(run_python, tmp_path, left):
    done = run_python("-u", "-c", NO_DESCRIPTORS, left, f"file://{tmp_path}/store")
    assert "Too many open files" in done.stdout and "ulimit -n" in done.stdout
