"""`torchrpc.local_group`: workers of this machine, and what is said when one of them fails."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from waiting import eventually

import torchrpc
import torchrpc.rpc as rpc

NO_GUARD = """
    import torchrpc
    group = torchrpc.local_group(2, start_method="spawn")
    print("formed")
"""
FAILING_CHILD = """
    import os, torchrpc
    if os.environ.get("PARENT") != str(os.getpid()) and "PARENT" in os.environ:
        {failure}
    os.environ["PARENT"] = str(os.getpid())
    if __name__ == "__main__":
        torchrpc.local_group(3, start_method="spawn")
"""

# Two interpreters import torch in this time, one after the other. Without a report, a group waits for half an hour.
AT_ONCE_S = 80


def count_threads():
    return torch.get_num_threads()


def run(tmp_path, text, **options):
    """Run a script; return its last line on stderr, and how many seconds it took."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    begin = time.monotonic()
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, **options)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1], time.monotonic() - begin


def test_a_group_is_formed_and_ended():
    with torchrpc.local_group(3) as group:
        assert group.names == ["worker0", "worker1", "worker2"]
        assert rpc.rpc_sync(group.names[2], torch.add, args=(1, 2)) == 3
        assert len({rpc.rpc_sync(name, os.getpid) for name in group.names}) == 3
        assert "3 workers" in repr(group)
    assert not rpc._is_current_rpc_agent_set()
    assert repr(group) == "LocalGroup(closed)"
    group.close()


def test_options_are_those_of_all_workers():
    with torchrpc.local_group(2, rpc_timeout=7.0, threads=1):
        assert rpc.get_rpc_timeout() == rpc.rpc_sync("worker1", rpc.get_rpc_timeout) == 7.0
        assert rpc.rpc_sync("worker1", count_threads) == 1


def test_survivors_go_on_when_a_worker_dies_and_the_end_names_it():
    group = torchrpc.local_group(3)
    os.kill(rpc.rpc_sync("worker1", os.getpid), signal.SIGKILL)
    with pytest.raises(torchrpc.WorkerLostError, match="worker1"):
        rpc.rpc_sync("worker1", time.sleep, args=(5,))
    assert rpc.rpc_sync("worker2", torch.add, args=(1, 2)) == 3
    with pytest.raises(RuntimeError, match=r"rank 1 died \(exit code -9\)"):
        group.close()
    assert not rpc._is_current_rpc_agent_set()
    with torchrpc.local_group(2):
        assert rpc.rpc_sync("worker1", torch.add, args=(1, 2)) == 3


@pytest.mark.parametrize("close", [False, True])
def test_a_forked_child_does_not_end_the_group_of_its_parent(close):
    group = torchrpc.local_group(2)
    if (pid := os.fork()) == 0:
        status = 1
        with contextlib.suppress(BaseException):
            if close:
                group.close()
            else:
                with group:
                    pass
            status = 0
        os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert rpc.rpc_sync("worker1", torch.add, args=(1, 2)) == 3
    group.close()


def test_the_error_of_the_block_is_the_one_that_is_raised():
    with pytest.raises(ZeroDivisionError), torchrpc.local_group(2):
        os.kill(rpc.rpc_sync("worker1", os.getpid), signal.SIGKILL)
        raise ZeroDivisionError


def test_a_size_below_one_is_refused():
    with pytest.raises(ValueError, match="world_size must be at least 1, but is 0"):
        torchrpc.local_group(0)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"world_size": "2"}, TypeError, "world_size must be an int, but is a str: '2'"),
        ({"world_size": 10**6}, ValueError, "world_size must be at most 32768, but is 1000000"),
        ({"world_size": 2.0}, TypeError, r"world_size must be an int, but is a float: 2\.0"),
        ({"timeout": "x"}, TypeError, "timeout must be a number of seconds, but is a str: 'x'"),
        ({"timeout": -1}, ValueError, "timeout must not be negative, but is -1"),
        ({"threads": 0}, ValueError, "threads must be at least 1, but is 0"),
        ({"threads": "x"}, TypeError, "threads must be an int, but is a str: 'x'"),
        (
            {"start_method": "thread"},
            ValueError,
            "start_method must be one of forkserver, spawn, fork, but is 'thread'",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, error, text):
    with pytest.raises(error, match=text):
        torchrpc.local_group(**{"world_size": 2, **arguments})


def test_a_group_that_the_program_does_not_keep_serves_until_the_program_ends(run_python, tmp_path):
    script = tmp_path / "dropped.py"
    script.write_text(
        "import gc, torchrpc, torchrpc.rpc as rpc\n"
        "if __name__ == '__main__':\n"
        "    torchrpc.local_group(2)\n"
        "    gc.collect()\n"
        "    print(rpc.rpc_sync('worker1', pow, args=(2, 5)))\n"
    )
    assert run_python(script).stdout == "32\n"


def test_a_worker_that_dies_before_the_group_has_formed_is_reported_at_once(tmp_path):
    text, seconds = run(tmp_path, FAILING_CHILD.format(failure="os._exit(7)"))
    assert "died (exit code 7)" in text
    assert seconds < AT_ONCE_S


def ignore_interrupts():
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def test_it_is_reported_at_once_in_a_script_that_ignores_interrupts(tmp_path):
    """As a shell has a script ignore them that it starts in the background."""
    failure = "import time; time.sleep(1); os._exit(7)"  # the program waits by then
    text, seconds = run(tmp_path, FAILING_CHILD.format(failure=failure), preexec_fn=ignore_interrupts)
    assert "died (exit code 7)" in text
    assert seconds < AT_ONCE_S


def test_the_handler_of_interrupts_is_the_former_one_again():
    former = signal.getsignal(signal.SIGINT)
    with torchrpc.local_group(2):
        assert signal.getsignal(signal.SIGINT) is former


def test_a_script_that_cannot_be_imported_again_is_told_where_its_own_part_belongs(tmp_path):
    for script in (NO_GUARD, FAILING_CHILD.format(failure="raise ValueError('mine')")):
        text, seconds = run(tmp_path, script)
        assert 'belongs below `if __name__ == "__main__":`' in text
        assert seconds < AT_ONCE_S


def test_an_option_that_is_refused_by_a_worker_is_reported_by_its_error():
    with pytest.raises(RuntimeError, match="secret"):
        torchrpc.local_group(2, secret="short")
    assert not rpc._is_current_rpc_agent_set()


class Numbers(torch.utils.data.Dataset):
    """A dataset whose items are the ids of the processes that load them."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return os.getpid()


class Loads:
    """Holds loaders whose processes stay."""

    def __init__(self, context):
        self.loader = torch.utils.data.DataLoader(
            Numbers(), num_workers=2, persistent_workers=True, multiprocessing_context=context
        )
        self.other = multiprocessing.get_context(context).Process(target=time.sleep, args=(1000,))
        self.other.start()

    def load(self):
        return [pid for batch in self.loader for pid in batch.tolist()]

    def other_pid(self):
        return self.other.pid


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between the opening and the reading
        return False
    return state != "Z"


def load(context):
    """Return an RRef to loaders on worker1, and the ids of their processes."""
    loads = rpc.remote("worker1", Loads, args=(context,))
    pids = set(loads.rpc_sync().load())
    assert len(pids) == 2 and os.getpid() not in pids
    return loads, pids | {loads.rpc_sync().other_pid()}


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_a_data_loader_has_processes_in_a_worker_which_end_with_it(start_method):
    with torchrpc.local_group(2, start_method=start_method):
        _, pids = load("fork")
        assert all(map(is_running, pids))
    eventually(lambda: not any(map(is_running, pids)), 30)


def test_processes_of_a_worker_that_is_killed_end():
    with pytest.raises(torchrpc.RankError, match="exit code -9"), torchrpc.local_group(2):
        _, pids = load("fork")
        os.kill(rpc.rpc_sync("worker1", os.getpid), signal.SIGKILL)
        eventually(lambda: not any(map(is_running, pids)), 30)


helpers = []  # of a worker


def start_helpers(context):
    """Start processes of each kind that Python has, and return their ids."""
    context = multiprocessing.get_context(context)
    pool, executor = context.Pool(2), concurrent.futures.ProcessPoolExecutor(2, context)
    manager = context.Manager()
    program = subprocess.Popen(["sleep", "1000"])
    process = context.Process(target=time.sleep, args=(1000,))
    process.start()
    helpers.extend((pool, executor, manager, program, process))
    busy = pool.map_async(time.sleep, [1000])  # the pool ends although a function runs
    helpers.append(busy)
    pids = {*pool.starmap(os.getpid, [()]), executor.submit(os.getpid).result(), manager._process.pid}
    return pids | {program.pid, process.pid}


@pytest.mark.parametrize("context", ["forkserver", "spawn", "fork"])
@pytest.mark.parametrize("is_killed", [False, True])
def test_all_processes_and_programs_that_a_worker_has_started_end_with_the_group(context, is_killed):
    group = torchrpc.local_group(2, timeout=60)
    pids = rpc.rpc_sync("worker1", start_helpers, (context,), timeout=60)
    assert len(pids) == 5 and all(map(is_running, pids))
    start = time.monotonic()
    if is_killed:
        os.kill(rpc.rpc_sync("worker1", os.getpid), signal.SIGKILL)
        with pytest.raises(torchrpc.RankError, match="exit code -9"):
            group.close()
    else:
        group.close()
    assert time.monotonic() - start < 30  # half of the time-out, at the end of which it would kill the workers
    eventually(lambda: not any(map(is_running, pids)), 30)


def test_a_forked_child_that_ends_in_order_leaves_the_workers_alone(run_python):
    assert run_python("-c", FORKS).stdout == "0 3\n"


FORKS = """
import os, sys, torchrpc, torchrpc.rpc as rpc
with torchrpc.local_group(2):
    if (pid := os.fork()) == 0:
        sys.exit()  # the exit handlers of multiprocessing run
    status = os.waitpid(pid, 0)[1]
    print(status, rpc.rpc_sync("worker1", sum, ([1, 2],)))
"""

ORPHANS = """
    import os, sys, threading, time
    import torchrpc
    import torchrpc.rpc as rpc

    def serve_forever():
        os.write(1, f"{os.getpid()}\\n".encode())
        while True:
            time.sleep(1)  # the function under test does not end

    if __name__ == "__main__":
        group = torchrpc.local_group(3, start_method=sys.argv[1])
        for name in group.names[1:]:
            rpc.rpc_async(name, serve_forever)
        time.sleep(1000)  # until it is killed
"""


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_no_worker_outlives_a_program_that_is_killed(tmp_path, start_method):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(ORPHANS))
    with subprocess.Popen([sys.executable, script, start_method], stdout=subprocess.PIPE, text=True) as program:
        pids = {int(program.stdout.readline()) for _ in range(2)}
        program.kill()
    eventually(lambda: not any(map(is_running, pids)), 60)


SCRIPT_FUNCTION = """
    import torch, torchrpc
    import torchrpc.rpc as rpc

    @torch.jit.script
    def double(x: torch.Tensor, times: int):
        return x * 2 * times

    def call_back(times):
        return rpc.rpc_sync("worker0", double, (torch.ones(1), times)).item()

    if __name__ == "__main__":
        with torchrpc.local_group(2):
            print(rpc.rpc_sync("worker1", double, (torch.ones(1), 3)).item(), rpc.rpc_sync("worker1", call_back, (4,)))
"""


def test_a_script_function_of_the_script_can_be_called_both_ways(run_python, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT_FUNCTION))
    assert run_python(script).stdout == "6.0 8.0\n"


BELOW_THE_GUARD = """
    import torchrpc
    import torchrpc.rpc as rpc

    if __name__ == "__main__":
        class Late:
            pass

        def late():
            return 1

        with torchrpc.local_group(2):
            for function in (late, Late):
                try:
                    rpc.rpc_sync("worker1", function)
                except rpc.NameNotFoundError as error:
                    print(str(error).split("NameNotFoundError: ")[-1].partition(" The Default RPC pickler")[0])
"""


def test_a_function_below_the_main_guard_is_an_error_with_its_name_its_file_and_the_rule(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(BELOW_THE_GUARD))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines() == [
        f"worker1 has no {name} in its module __main__ ({script}). Define it at the top level of that file, outside of "
        '`if __name__ == "__main__":`, because the other workers load the file without that block.'
        for name in ("late", "Late")
    ]


VARIABLES_BELOW_THE_GUARD = """
    import torchrpc
    import torchrpc.rpc as rpc

    if __name__ == "__main__":
        factor = 3
        with torchrpc.local_group(2):
            for function in (lambda: factor, lambda: unbound(), lambda: int(len(())) + len(factor)):
                try:
                    rpc.rpc_sync("worker1", function)
                except NameError as error:
                    print(str(error).splitlines()[1:3])
            try:
                rpc.rpc_sync("worker1", exec, ("missing", {}))
            except NameError as error:
                print("outside" in str(error))
"""


def test_a_function_that_uses_a_variable_below_the_main_guard_gets_the_rule_with_the_error(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(VARIABLES_BELOW_THE_GUARD))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=True)
    names = ["factor", "unbound", "factor"]
    assert done.stdout.splitlines() == [
        str(
            [
                f"""NameError("name '{name}' is not defined")""",
                f"worker1 has no {name} in its module __main__ ({script}). Define it at the top level of that file, "
                'outside of `if __name__ == "__main__":`, because the other workers load the file without that block.',
            ]
        )
        for name in names
    ] + ["False"]


IN_A_CELL = """
    import torchrpc
    import torchrpc.rpc as rpc

    sys.modules["torchrpc.rpc._values.by_value"]._has_cloudpickle = lambda: False  # as if it were not installed
    group = torchrpc.local_group(2)
    try:
        rpc.rpc_sync("worker1", late)
    except rpc.NameNotFoundError as error:
        print(error)
    group.close()
"""


def test_a_function_of_a_notebook_without_cloudpickle_is_an_error_with_the_rule():
    program = "import sys, torchrpc.rpc as rpc; rpc.init_rpc\ndef late(): pass\n" + textwrap.dedent(IN_A_CELL)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert "worker1 has no late in its module __main__ (which has no file). Install cloudpickle on all" in done.stdout


def shut_down_in_the_block():
    start = time.monotonic()
    with torchrpc.local_group(2, start_method="fork") as group:
        assert rpc.rpc_sync("worker1", max, (1, 2)) == 2
        rpc.shutdown()
        assert not rpc._is_current_rpc_agent_set()
    assert repr(group) == "LocalGroup(closed)"
    return time.monotonic() - start


def test_shutdown_in_the_block_ends_all_workers():
    assert shut_down_in_the_block() < 30  # it would wait for ever for the other worker
