"""`torchrpc.local_group`: workers of this machine, and what is said when one of them fails."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

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


def count_threads():
    return torch.get_num_threads()


def run(tmp_path, text, **options):
    """Run a script; return its last line on stderr, and how many seconds it took."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    begin = time.monotonic()
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, **options)
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


def test_the_error_of_the_block_is_the_one_that_is_raised():
    with pytest.raises(ZeroDivisionError), torchrpc.local_group(2):
        os.kill(rpc.rpc_sync("worker1", os.getpid), signal.SIGKILL)
        raise ZeroDivisionError


def test_a_size_below_one_is_refused():
    with pytest.raises(ValueError, match="world_size must be at least 1, but is 0"):
        torchrpc.local_group(0)


def test_a_worker_that_dies_before_the_group_has_formed_is_reported_at_once(tmp_path):
    text, seconds = run(tmp_path, FAILING_CHILD.format(failure="os._exit(7)"))
    assert "died (exit code 7)" in text
    assert seconds < 20


def ignore_interrupts():
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def test_it_is_reported_at_once_in_a_script_that_ignores_interrupts(tmp_path):
    """As a shell has a script ignore them that it starts in the background."""
    failure = "import time; time.sleep(1); os._exit(7)"
    text, seconds = run(tmp_path, FAILING_CHILD.format(failure=failure), preexec_fn=ignore_interrupts)
    assert "died (exit code 7)" in text
    assert seconds < 20


def test_the_handler_of_interrupts_is_the_former_one_again():
    former = signal.getsignal(signal.SIGINT)
    with torchrpc.local_group(2):
        assert signal.getsignal(signal.SIGINT) is former


def test_a_script_that_cannot_be_imported_again_is_told_where_its_own_part_belongs(tmp_path):
    for script in (NO_GUARD, FAILING_CHILD.format(failure="raise ValueError('mine')")):
        text, seconds = run(tmp_path, script)
        assert 'belongs below `if __name__ == "__main__":`' in text
        assert seconds < 20


def test_an_option_that_is_refused_by_a_worker_is_reported_by_its_error():
    with pytest.raises(RuntimeError, match="secret"):
        torchrpc.local_group(2, secret="short")
    assert not rpc._is_current_rpc_agent_set()
