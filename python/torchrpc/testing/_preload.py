"""The modules that a fork server loads once for all its children. Importing them must start no thread."""

import torch  # noqa: F401

import torchrpc.rpc.api  # noqa: F401
