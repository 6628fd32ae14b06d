"""What the launcher of this process says, and what a launcher of your own needs.

`init_rpc` asks the same launchers. A script that gives its ranks different work asks here, before it joins.
"""

from typing import NamedTuple

__all__ = ["Launch", "find_launch"]


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
