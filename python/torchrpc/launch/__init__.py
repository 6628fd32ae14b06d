"""What the launcher of this process says, and what a launcher of your own needs.

`init_rpc` asks the same launchers. A script that gives its ranks different work asks here, before it joins.
"""

import socket
from typing import Any, NamedTuple

__all__ = ["Launch", "StoreServer", "find_launch"]


class Launch(NamedTuple):
    """What a launcher has told the process that it started.

    Attributes:
        launcher (str): its name, for humans to read.
        rank (int): this process's number, from 0.
        world_size (int or None): the number of processes; None if the launcher does not say.
    """

    launcher: str
    rank: int
    world_size: int | None


def find_launch() -> Launch | None:
    """Return what the launcher of this process says (`init_rpc` uses the same); None without a launcher.

    It reads the environment only. The variables RANK and WORLD_SIZE, which torchrun sets, come first, then those of
    Open MPI, Slurm, other MPI launchers, and an indexed Job of Kubernetes. Any thread may call it.

    Raises:
        RuntimeError: a variable that must be a number is none; the text names it.
    """
    import torch  # noqa: F401 - the extension needs its libraries

    from torchrpc._C import _find_launch

    found = _find_launch()
    return None if found is None else Launch(found[0], found[1], found[2] or None)


class StoreServer:
    """Serves the store where a group meets, in a process that is no worker, so that any worker can be started again.

    A launcher of your own makes one, gives `environment(rank, world_size)` to each process that it starts, and to each
    that it starts again, and keeps the server until the group has ended. As a context manager it closes itself.

    Args:
        host (str): the name or address of this machine under which the workers reach it. The server listens on the
            interface with that address only.
        port (int): where it listens; 0: a free port, which the attribute `port` has then.

    Raises:
        OSError: `host` is no address of this machine, or the port is in use.

    Whoever reaches the store can join a group without a secret: give the workers a `TORCHRPC_SECRET_FILE`, too, if
    others can. Any thread may use it.

    Example:
        >>> with torchrpc.launch.StoreServer("127.0.0.1") as server:
        ...     variables = server.environment(rank=0, world_size=2)
        >>> [variables[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")]
        ['0', '2', '127.0.0.1']
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        import torch.distributed as dist

        self.host = host
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # it may be a restart
            listener.bind(address)
            listener.listen(4096)
            self.port = int(listener.getsockname()[1])
            self._store: Any = dist.TCPStore(
                host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=listener.detach(),
            )

    def environment(self, rank: int, world_size: int) -> dict[str, str]:
        """Return the variables from which `init_rpc()` takes rank, world size and the place to meet.

        Raises:
            ValueError: the rank is not from 0 to `world_size - 1`.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be from 0 to {world_size - 1}, as world_size is {world_size}, but is {rank}.")
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 does not serve the store
        }

    def close(self) -> None:
        """Stop serving. Workers of the group that are still there can go on, but none can be started again."""
        self._store = None

    def __enter__(self) -> "StoreServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
