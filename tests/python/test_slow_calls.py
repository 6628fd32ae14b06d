"""Calls that take longer than a limit are logged, by caller and callee, with fields for machines."""

import logging
import re
import threading
import time
from pathlib import Path

import pytest

import torchrpc.rpc as rpc
from torchrpc.testing import run_ranks, workers

NAME = f"{__name__}."


class Records(logging.Handler):
    """Keeps the records of the logger torchrpc.calls."""

    def __init__(self):
        super().__init__()
        logging.getLogger("torchrpc.calls").setLevel(logging.WARNING)  # whatever TORCHRPC_LOG another test has set
        self.records = []
        self._arrived = threading.Condition()

    def emit(self, record):
        with self._arrived:
            self.records.append(record)
            self._arrived.notify_all()

    def wait_for(self, count, function=None):
        """The records about that function, or all, when there are so many."""

        def found():
            return [record for record in self.records if function in (None, record.function)]

        with self._arrived:
            assert self._arrived.wait_for(lambda: len(found()) >= count, 30), self.texts()
            return found()

    def texts(self):
        return [record.getMessage() for record in self.records]


_records = None


def keep_records():
    global _records
    _records = Records()
    logging.getLogger("torchrpc.calls").addHandler(_records)


def drop_records():
    logging.getLogger("torchrpc.calls").removeHandler(_records)


@pytest.fixture
def records():
    keep_records()
    yield _records
    drop_records()


def texts_of(function, count):
    found = _records.wait_for(count, function)
    return [(r.getMessage(), r.levelname, r.worker, r.peer, r.function, r.age_s) for r in found]


_may_end = threading.Event()


def wait_to_end():
    _may_end.wait(60)


def let_end():
    _may_end.set()


def quick():
    pass


def test_a_slow_call_is_logged_by_both_sides_and_again_when_it_has_ended(records):
    with workers(2, slow_call_s=0.2):
        rpc.rpc_sync("worker1", keep_records)
        begun = time.monotonic()
        rpc.rpc_sync("worker1", quick)
        is_quick = time.monotonic() - begun < 0.2  # on a busy machine it may not be
        function = NAME + "wait_to_end"
        future = rpc.rpc_async("worker1", wait_to_end)
        records.wait_for(1, function)
        rpc.rpc_sync("worker1", texts_of, args=(function, 1))
        rpc.rpc_sync("worker1", let_end)
        future.wait()
        first, last = records.wait_for(2, function)
        assert re.fullmatch(
            rf"worker0 has waited \d+\.\d s for worker1 to answer {re.escape(function)}", first.getMessage()
        )
        assert last.getMessage().startswith(f"{function} on worker1, called by worker0, took ")
        for record in (first, last):
            assert record.levelno == logging.WARNING and record.name == "torchrpc.calls"
            assert (record.worker, record.peer, record.function) == ("worker0", "worker1", function)
            assert record.age_s >= 0.2
        served = rpc.rpc_sync("worker1", texts_of, args=(function, 2))
        assert served[0][0].startswith(f"worker1 has served {function} for worker0 for ")
        assert "; its thread waits for no other worker, at " in served[0][0]
        line = wait_to_end.__code__.co_firstlineno + 1
        assert served[0][0].endswith(
            f"/{Path(__file__).name}:{line}"
        )  # and not where Event.wait waits, in threading.py
        assert served[1][0].startswith(f"{function}, which worker1 served for worker0, took ")
        assert [fields[1:5] for fields in served] == 2 * [("WARNING", "worker1", "worker0", function)]
        assert not is_quick or not [record for record in records.records if record.function == NAME + "quick"]


def test_without_the_option_nothing_is_logged(records):
    with workers(2):
        rpc.rpc_sync("worker1", time.sleep, args=(0.5,))
    assert records.texts() == []


def keep_the_gil_for(microseconds):
    import ctypes

    ctypes.PyDLL(None).usleep(microseconds)  # PyDLL: without releasing the GIL


def call_one_that_keeps_the_gil(rank):
    if rank == 0:
        rpc.rpc_sync("worker1", keep_the_gil_for, args=(4_000_000,))


def test_a_function_that_keeps_the_gil_is_named_on_standard_error(capfd):
    run_ranks(call_one_that_keeps_the_gil, 2, env={"TORCHRPC_SLOW_CALL_S": "0.5"}, start_method="fork")
    err = capfd.readouterr().err
    # The line of worker1 could not wait for the GIL.
    assert f"torchrpc warning: worker1 has served {NAME}keep_the_gil_for for worker0 for" in err


def test_a_wrong_limit_is_refused(monkeypatch):
    for bad in (-1, float("nan")):
        with pytest.raises(RuntimeError, match="slow_call_s must be a number of seconds, not negative"):
            rpc.TensorPipeRpcBackendOptions(slow_call_s=bad)
    with pytest.raises(TypeError, match="slow_call_s must be a number of seconds"):
        rpc.TensorPipeRpcBackendOptions(slow_call_s="5")
    assert rpc.TensorPipeRpcBackendOptions(slow_call_s=5).slow_call_s == 5
    assert rpc.TensorPipeRpcBackendOptions().slow_call_s is None
    run_ranks(refuse_the_variable, 1, init=False, env={"TORCHRPC_SLOW_CALL_S": "soon"})


def refuse_the_variable(_):
    with pytest.raises(RuntimeError, match="TORCHRPC_SLOW_CALL_S must be a number of seconds, but is 'soon'"):
        rpc.init_rpc("w", rank=0, world_size=1)
