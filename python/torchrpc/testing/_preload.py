"""What a fork server loads once for all processes that it will start. No threads may come of it."""

import torch  # noqa: F401

import torchrpc.rpc.api  # noqa: F401
