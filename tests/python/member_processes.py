"""Worker processes that a test starts, kills and starts again; each runs what the test tells it."""

import contextlib
import multiprocessing
import os
import traceback

from torchrpc.testing import start_process

LIMIT_S = 60


class RemoteFailure(AssertionError):
    """A function raised in a worker's process; the text has the type of the exception and its traceback."""


def _run(connection, environment):
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            function, args = connection.recv()
            try:
                outcome = (True, function(*args))
            except BaseException as error:
                outcome = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
            connection.send(outcome)
    os._exit(0)


class WorkerProcess:
    """One process; `begin` starts a function in it, `result` waits for that, `run` does both."""

    def __init__(self, environment):
        self.connection, child_end = multiprocessing.Pipe()
        self.process = start_process(_run, child_end, environment, daemon=True)
        child_end.close()

    @property
    def pid(self):
        return self.process.pid

    def begin(self, function, *args):
        self.connection.send((function, args))

    def has_result(self, seconds=0):
        return self.connection.poll(seconds)

    def result(self, seconds=LIMIT_S):
        assert self.connection.poll(seconds), f"the process {self.pid} has not answered in {seconds} s"
        is_ok, value = self.connection.recv()
        if not is_ok:
            raise RemoteFailure(value)
        return value

    def run(self, function, *args, seconds=LIMIT_S):
        self.begin(function, *args)
        return self.result(seconds)

    def kill(self):
        self.process.kill()
        self.process.join()

    def end(self):
        self.connection.close()
        self.process.join(5)
        self.kill()


class Members:
    """The processes of a group. A place is a rank; `start` puts a new process into it.

    Attributes:
        environment (dict): variables of all processes that are started from then on.
    """

    def __init__(self, size, url, **options):
        self.size, self.url, self.options = size, url, options
        self.environment = {"TORCHRPC_INIT_TIMEOUT": str(LIMIT_S)}
        self.workers = {}
        self.prepared = {}
        self.all = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for worker in self.all:
            worker.kill()

    def __getitem__(self, rank):
        return self.workers[rank]

    def prepare(self, rank):
        """Start a process that begin() lets join later, at once: the others wait only so long for a lost worker."""
        worker = WorkerProcess({**self.environment, "RANK": str(rank)})
        self.all.append(worker)
        worker.run(load)
        self.prepared[rank] = worker

    def begin(self, rank, **options):
        """Start a process that joins as the worker of that rank, or take the prepared one."""
        worker = self.prepared.pop(rank, None)
        if worker is None:
            worker = WorkerProcess({**self.environment, "RANK": str(rank)})
            self.all.append(worker)
        self.workers[rank] = worker
        worker.begin(join, rank, self.size, self.url, {**self.options, **options})
        return worker

    def start(self, *ranks):
        """The same for several, or for all; waits until they have joined."""
        started = [self.begin(rank) for rank in ranks or range(self.size)]
        for worker in started:
            worker.result()

    def each(self, function, *args):
        """Run a function in all at the same time; return the results by rank."""
        workers = [self.workers[rank] for rank in range(self.size)]
        for worker in workers:
            worker.begin(function, *args)
        return [worker.result() for worker in workers]


def load():
    import torchrpc.rpc as rpc

    assert rpc.__all__  # loads the extension


def join(rank, size, url, options):
    import torchrpc.rpc as rpc

    rpc.init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=url, **options),
    )
    return os.getpid()


def leave(graceful=True):
    import torchrpc.rpc as rpc

    rpc.shutdown(graceful=graceful)
