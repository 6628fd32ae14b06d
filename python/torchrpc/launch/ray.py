"""A group of workers in Ray actors. Ray places the actors, and restarts those that die.

Ray gives an actor neither a rank nor a store. So the driver serves the group's store, and the environment of each
actor's process has the variables from which `init_rpc()` takes rank and store, also after Ray has restarted the actor
on another node. The driver uses this module, with one thread at a time.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from . import StoreServer

__all__ = ["RayGroup", "start"]


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError("torchrpc.launch.ray needs Ray: pip install 'torchrpc[ray]'") from error
    return ray


class _Actor:
    def __init__(self) -> None:
        self._returned: list[Any] = []  # the result of the function in this process, if it has ended

    def run(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        # Ray also repeats the call if only the connection to this process broke.
        if not self._returned:
            self._returned.append(function(*args, **kwargs))
        return self._returned[0]


class RayGroup:
    """The actors of a group; `start` makes it.

    Attributes:
        actors (list): Ray's handles of the actors, by rank.
        results (list): Ray's references to the results of the function, by rank.
        placement_group: Ray's placement group, with a bundle for each rank.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        world_size: int,
        call: tuple[tuple, dict[str, Any]],
        max_restarts: int,
        resources: dict[str, float],
        strategy: str,
        environment: dict[str, str],
    ) -> None:
        ray = _ray()
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray = ray
        self.actors: list[Any] = []
        self.placement_group = ray.util.placement_group([resources] * world_size, strategy=strategy)
        self._store: StoreServer | None = None
        try:
            ray.get(self.placement_group.ready())
            self._store = StoreServer(ray.util.get_node_ip_address())
            cpus, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
            other = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
            for rank in range(world_size):
                variables = {**environment, **self._store.environment(rank, world_size)}
                actor = ray.remote(_Actor).options(
                    num_cpus=cpus,
                    num_gpus=gpus,
                    resources=other,
                    max_restarts=max_restarts,
                    # Ray repeats the call of the function in a restarted actor. Repetitions are not limited, because
                    # Ray repeats the call in vain a few times before it notices the end of a node.
                    max_task_retries=-1 if max_restarts else 0,
                    runtime_env={"env_vars": variables},
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        self.placement_group, placement_group_bundle_index=rank
                    ),
                )
                self.actors.append(actor.remote())
            self.results = [actor.run.remote(function, *call) for actor in self.actors]
        except BaseException:
            self.close()
            raise

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Wait until the function has returned in all actors; return its results, by rank.

        Args:
            timeout (float): seconds; None: no limit.

        Raises:
            ray.exceptions.RayTaskError: the function raised; the text has its traceback. It is not run again.
            ray.exceptions.RayActorError: an actor died more often than `max_restarts`.
            ray.exceptions.GetTimeoutError: the time-out has passed.
        """
        return self._ray.get(self.results, timeout=timeout)

    def close(self) -> None:
        """Kill the actors and release their resources. A second call does nothing."""
        for actor in self.actors:
            self._ray.kill(actor)
        self.actors = []
        if self.placement_group is not None:
            self._ray.util.remove_placement_group(self.placement_group)
            self.placement_group = None
        if self._store is not None:
            self._store.close()

    def __enter__(self) -> "RayGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start(
    function: Callable[..., Any],
    world_size: int,
    *,
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    max_restarts: int = 3,
    resources: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    environment: Mapping[str, str] | None = None,
) -> RayGroup:
    """Run `function(*args, **kwargs)` in `world_size` Ray actors, which form a group when it calls `init_rpc()`.

    The function must be in a module that the actors can import, because workers find called functions by name. The
    module can be beside the driver's script, in Ray's `working_dir`, or on PYTHONPATH.

    Ray restarts an actor that dies, with the same rank, and the function runs in it from the beginning. Its
    `init_rpc()` takes the place of the lost worker, and the other workers go on. A function that raises is not run
    again.

    Args:
        function (Callable): runs in each actor. It calls `init_rpc` and, at its end, `shutdown`.
        world_size (int): the number of actors.
        args (tuple), kwargs (dict): arguments of the function, the same for all ranks.
        max_restarts (int): how often Ray may restart each actor; -1: any number of times.
        resources (dict): what each actor needs, for example `{"CPU": 2, "GPU": 1}`; default: one CPU. The call
            waits until the cluster has all of it.
        strategy (str): how Ray places the actors on nodes: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
        environment (dict): additional environment variables of the actors, for example TORCHRPC_SECRET_FILE, or
            TORCHRPC_REPLACE for a function that uses `torch.distributed.rpc`.

    Raises:
        ImportError: Ray is not installed: `pip install 'torchrpc[ray]'`.
        ValueError: `world_size` is less than 1.

    The driver, which calls this function, serves the group's store: once the driver has ended, no worker can be
    restarted. Call `ray.init` first if Ray does not find the cluster by itself.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, but is {world_size}.")
    return RayGroup(
        function,
        world_size,
        (tuple(args), dict(kwargs or {})),
        max_restarts,
        dict(resources or {"CPU": 1}),
        strategy,
        dict(environment or {}),
    )
