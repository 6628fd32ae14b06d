"""Modules that live on another worker: the API of `torch.distributed.nn.RemoteModule`."""

from .remote_module import RemoteModule

__all__ = ["RemoteModule"]
