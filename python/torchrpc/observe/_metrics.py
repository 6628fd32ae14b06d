"""The counters of calls that the core keeps, as Python objects. Any thread may call these functions."""

from dataclasses import dataclass

from torchrpc._C import _call_counts, _enable_metrics


@dataclass(frozen=True)
class FunctionMetrics:
    """This worker's counters of one function, with one peer and on one side, from the time while metrics were on.

    Attributes:
        function (str): its name, `"package.module.f"` or `"aten::add"`. Messages that name no function, such as those
            of backward passes, have the name of their kind: `"BACKWARD_AUTOGRAD_REQ"`. `"other"` stands for all
            functions and peers beyond the first 4,096 pairs of a side.
        peer (str): the other worker.
        side (str): `"out"`: calls that this worker made, from the call to its reply; `"in"`: calls that it served,
            from the start of the function to its reply.
        calls (int): calls that have ended, with a result or an error. A call that is sent again counts once.
        in_flight (int): calls that have begun and not ended.
        errors (dict): code of the error (`"timeout"`, `"user exception"`, …) -> number of calls that ended with it.
        request_bytes, reply_bytes (int): bytes of the payloads and tensors.
        total_s, max_s (float): the sum and the maximum of the latencies, in seconds.
        p50_s, p99_s (float): the median and the 99th percentile of the latencies, in seconds, rounded up to the end of
            their bucket. 0 without calls.
        buckets (list): (end of the bucket in seconds, number of its calls) for each bucket that is not empty. A bucket
            is at most 12.5 % wide; the first one begins at 0, the last one ends at infinity.
    """

    function: str
    peer: str
    side: str
    calls: int
    in_flight: int
    errors: dict[str, int]
    request_bytes: int
    reply_bytes: int
    total_s: float
    max_s: float
    p50_s: float
    p99_s: float
    buckets: list[tuple[float, int]]


def enable_metrics(enabled: bool = True) -> None:
    """Count the calls of this worker from now on, or stop counting. Stopping keeps the counters.

    The option `metrics` of `TensorPipeRpcBackendOptions`, or the environment variable TORCHRPC_METRICS, turns metrics
    on from the start. While metrics are off they cost nothing.

    Raises:
        ShutdownError: RPC is not initialized.
        TypeError: `enabled` is not a bool.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enable_metrics: enabled must be a bool, but is a {type(enabled).__name__}: {enabled!r}.")
    _enable_metrics(enabled)


def functions() -> list[FunctionMetrics]:
    """Return the counters of this worker: an item for each function, peer and side, in the order of their first calls.

    Calls go on meanwhile, so the numbers of one item may come from slightly different moments.

    Raises:
        ShutdownError: RPC is not initialized.

    Example:
        >>> torchrpc.observe.enable_metrics()
        >>> rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
        tensor([2., 2.])
        >>> [(row.function, row.peer, row.side, row.calls) for row in torchrpc.observe.functions()]
        [('aten::add', 'worker1', 'out', 1)]
    """
    return [FunctionMetrics(**row) for row in _call_counts()]
