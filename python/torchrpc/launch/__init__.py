"""Rank and world size from the launcher of this process, and a store server for launchers of your own.

`init_rpc` reads the same values. A script that gives its ranks different work can call `find_launch` before it joins.
"""

import socket
from typing import Any, NamedTuple

__all__ = ["Launch", "StoreServer", "find_launch"]


class Launch(NamedTuple):
    """The rank and world size that a launcher has given to this process.

    Attributes:
        launcher (str): its name, for humans to read.
        rank (int): this process's number, from 0.
        world_size (int or None): the number of processes; None if the launcher does not give it.
    """

    launcher: str
    rank: int
    world_size: int | None


def find_launch() -> Launch | None:
    """Return rank and world size from the launcher of this process, as `init_rpc` reads them; None without a launcher.

    It reads the environment only. The variables RANK and WORLD_SIZE, which torchrun sets, come first, then those of
    Open MPI, Slurm, other MPI launchers, and an indexed Job of Kubernetes. Any thread may call it.

    Raises:
        RuntimeError: a variable that must be a number is not one; the text names the variable.
    """
    import torch  # noqa: F401 - the extension needs its libraries

    from torchrpc._C import _find_launch

    found = _find_launch()
    return None if found is None else Launch(found[0], found[1], found[2] or None)


class StoreServer:
    """Serves a group's rendezvous store in a process that is not a worker, so that any worker can be restarted.

    A launcher of your own creates one server, passes `environment(rank, world_size)` to each process that it starts or
    restarts, and keeps the server until the group has ended. The end of a `with` block closes the server.

    Args:
        host (str): the name or address under which the workers reach this machine. The server listens only on the
            interface with that address.
        port (int): the port to listen on; 0: a free port. The attribute `port` is the actual one.

    Raises:
        OSError: `host` is not an address of this machine, or the port is in use.

    Any process that can reach the store can join a group to which you gave no secret. If untrusted processes can
    reach it, give the workers a `TORCHRPC_SECRET_FILE`, too. Any thread may use the server.

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
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restarted server may reuse the port
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
        """Return the environment variables from which `init_rpc()` takes rank, world size and the address of the store.

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
        """Stop serving. Workers that still run can go on, but no worker can be restarted."""
        self._store = None

    def __enter__(self) -> "StoreServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
