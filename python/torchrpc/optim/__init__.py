"""The API of `torch.distributed.optim.DistributedOptimizer`: optimizers for parameters on other workers.

Importing it loads no C++: the first optimizer of a worker loads the extension.
"""

from ._upstream import _local_optimizer_step as _local_optimizer_step
from ._upstream import _LocalOptimizer as _LocalOptimizer
from ._upstream import _new_local_optimizer as _new_local_optimizer
from ._upstream import _wait_for_all as _wait_for_all
from .distributed import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
