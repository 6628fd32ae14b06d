"""Rows of larger groups: all workers call all others, a parameter server, a broadcast of a model, init_rpc."""

import threading
import time

import torch
import torch.distributed.rpc as rpc
from pair_rows import nothing
from rows import RATE, Meter, row


def others(rank: int, world_size: int) -> list[str]:
    return [f"worker{other}" for other in range(world_size) if other != rank]


def call_all(rank: int, world_size: int, count: int) -> None:
    peers = others(rank, world_size)
    for _ in range(count):
        torch.futures.wait_all([rpc.rpc_async(peer, nothing) for peer in peers])


def _all_to_all_row(workers):
    @row(
        f"{workers} workers, each calling all others", f"{workers} workers", workers=workers, unit=RATE, targets=(1, 1)
    )
    def all_to_all(meter: Meter):
        def run(count):
            torch.futures.wait_all(
                [rpc.rpc_async(f"worker{rank}", call_all, args=(rank, workers, count)) for rank in range(workers)]
            )

        count, seconds = meter.long_run(run)
        return count * workers * (workers - 1) / seconds


class ParameterServer:
    """Averages the gradients of all trainers, steps, and replies to all of them with the new parameters."""

    def __init__(self, trainers: int):
        self.parameters = [torch.zeros(64, 64) for _ in range(4)]
        self.trainers = trainers
        self.lock = threading.Lock()
        self.begin_round()

    def begin_round(self) -> None:
        self.gradients = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.received = 0
        self.updated: torch.futures.Future = torch.futures.Future()

    @staticmethod
    @rpc.functions.async_execution
    def update(server_rref, gradients):
        self = server_rref.local_value()
        with self.lock:
            for sum_, gradient in zip(self.gradients, gradients, strict=True):
                sum_ += gradient
            self.received += 1
            updated = self.updated
            if self.received == self.trainers:
                for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
                    parameter -= 0.01 / self.trainers * gradient
                self.begin_round()
                updated.set_result([parameter.clone() for parameter in self.parameters])
        return updated


def train(server_rref, count: int) -> None:
    gradients = [torch.ones(64, 64) for _ in range(4)]
    for _ in range(count):
        rpc.rpc_sync(server_rref.owner(), ParameterServer.update, args=(server_rref, gradients))


def _parameter_server_row(trainers):
    @row(
        f"parameter server with {trainers} trainers, their updates",
        f"{trainers} trainers",
        workers=1 + trainers,
        unit=RATE,
        targets=(1, 1),
    )
    def parameter_server(meter: Meter):
        server = rpc.RRef(ParameterServer(trainers))

        def run(count):
            torch.futures.wait_all(
                [rpc.rpc_async(trainer, train, args=(server, count)) for trainer in others(0, 1 + trainers)]
            )

        count, seconds = meter.long_run(run)
        return count * trainers / seconds


def take(parameters) -> int:
    return len(parameters)


@row("a model's 32 tensors of 256 KiB to 8 workers", "model", workers=9)
def broadcast(meter: Meter):
    parameters = [torch.ones(256, 256) for _ in range(32)]

    def send():
        torch.futures.wait_all([rpc.rpc_async(peer, take, args=(parameters,)) for peer in others(0, 9)])

    return meter.latency(send)


def _init_row(workers):
    @row(f"init_rpc and shutdown, {workers} workers", f"init {workers}", workers=workers, targets=(1, 1), bare=True)
    def init_and_shutdown(meter: Meter):
        _barrier(meter, "ready")
        begin = time.monotonic()
        options = rpc.TensorPipeRpcBackendOptions(init_method=meter.init_method, **meter.options)
        rpc.init_rpc(f"worker{meter.rank}", rank=meter.rank, world_size=workers, rpc_backend_options=options)
        rpc.shutdown()
        end = time.monotonic()
        meter.store.set(f"times {meter.rank}", f"{begin} {end}")
        times = [tuple(map(float, meter.store.get(f"times {rank}").split())) for rank in range(workers)]
        _barrier(meter, "done")
        return max(end for _, end in times) - min(begin for begin, _ in times)


def _barrier(meter: Meter, name: str) -> None:
    if meter.store.add(name, 1) == meter.world_size:
        meter.store.set(name + " all", "")
    meter.store.wait([name + " all"])


for _workers in (4, 8):
    _all_to_all_row(_workers)
for _trainers in (2, 4, 8):
    _parameter_server_row(_trainers)
for _workers in (2, 4, 8, 16):
    _init_row(_workers)
