"""The API of `torch.distributed.optim.DistributedOptimizer`: optimizers for parameters on other workers.

Importing it loads no C++: the first optimizer of a worker loads the extension.
"""

from .distributed import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
