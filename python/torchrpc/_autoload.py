"""What `import torch` calls at its end, as an entry point of the group `torch.backends`.

Nearly every process that comes here wants nothing of torchrpc and must not pay for it.
"""

import os
import sys

from . import _wrong_torch


def asked_to_replace() -> bool:
    """Whether the environment asks for torch.distributed.rpc to be replaced."""
    return os.environ.get("TORCHRPC_REPLACE", "").strip().lower() not in ("", "0", "false", "no", "off")


def autoload() -> None:
    """Replace torch's RPC if TORCHRPC_REPLACE says so; serve where torch was built without one.

    Raises RuntimeError only if it was asked to replace and cannot.
    """
    if why := _wrong_torch():
        if asked_to_replace():
            raise RuntimeError(why)
        del sys.modules["torchrpc"]  # who imports it by name is told
        return
    if asked_to_replace():
        from ._install import install

        install()
    elif not hasattr(sys.modules["torch"]._C, "_rpc_init"):
        from ._install import fill_gap

        fill_gap()
