"""The accelerator of this process. The extension asks for it when a worker starts."""

import torch


def accelerator() -> torch.device:
    """Return the type of this machine's accelerator; CUDA's type, without devices, if torch is built without one."""
    return torch.accelerator.current_accelerator() or torch.device("cuda")


def count_accelerators() -> tuple[torch.device, int]:
    """Return the type of the accelerator and the number of its devices."""
    kind = accelerator()
    # Asks the device's own module, because torch.cuda.device_count() leaves CUDA usable in forked child processes.
    return kind, torch.get_device_module(kind).device_count()
