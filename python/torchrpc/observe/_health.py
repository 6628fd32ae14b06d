"""Where this worker answers health checks."""

from torchrpc._C import TensorPipeAgent, _get_current_rpc_agent


def health_address() -> str:
    """Return the address, with the port, at which this worker answers health checks; `""` without the option `health`.

    Raises:
        ShutdownError: RPC is not initialized.
    """
    agent = _get_current_rpc_agent()
    return agent._health_address() if isinstance(agent, TensorPipeAgent) else ""
