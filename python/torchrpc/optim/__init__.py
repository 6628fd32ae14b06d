"""The API of `torch.distributed.optim.DistributedOptimizer`: optimizers for parameters on other workers.

Importing it loads no C++: the extension is loaded when an optimizer is made, by a worker that has joined.
"""

from .distributed import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
