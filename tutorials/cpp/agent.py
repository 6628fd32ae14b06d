"""A Python agent that learns from environments in a C++ process (environment_server.cpp).

    python agent.py build/tutorials/environment_server

The agent has an RRef to the environments. In each step it passes the RRef to a C++ function, which steps all
environments in one call. It learns by policy gradient (REINFORCE; Williams 1992) until the poles stay up for `--target`
steps on average.
"""

import argparse
import socket
import subprocess
import time

import torch
from torch import nn

import torchrpc.rpc as rpc
from torchrpc import cpp_function

RESET, STEP = cpp_function("reset"), cpp_function("step")


def play(environments, policy, steps):
    """Play one episode in all environments; return (steps, n) log probabilities of actions, and which poles were up."""
    owner = environments.owner()
    observation = rpc.rpc_sync(owner, RESET, args=(environments,))
    up = torch.ones(len(observation), dtype=torch.bool)
    chosen, alive = [], []
    for _ in range(steps):
        action = torch.distributions.Categorical(logits=policy(observation))
        pushes = action.sample()
        chosen.append(action.log_prob(pushes))
        alive.append(up)
        observation, up = rpc.rpc_sync(owner, STEP, args=(environments, pushes))
        if not up.any():
            break
    return torch.stack(chosen), torch.stack(alive).float()


def learn(environments, options):
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    steps, start = 0, time.perf_counter()
    for episode in range(options.episodes):
        log_probabilities, alive = play(environments, policy, options.steps)
        remaining = alive.flip(0).cumsum(0).flip(0)  # steps that each pole stays up, from each step on
        advantage = (remaining - remaining.mean()) / (remaining.std() + 1e-6)
        loss = -(log_probabilities * advantage * alive).sum() / alive.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += len(alive)
        mean = alive.sum(0).mean().item()
        if episode % 10 == 0 or mean >= options.target:
            print(f"episode {episode}: up for {mean:.0f} steps", flush=True)
        if mean >= options.target:
            rate = steps / (time.perf_counter() - start)
            print(f"solved: up for {mean:.0f} steps after {episode + 1} episodes; {rate:.0f} calls/s")
            return
    raise SystemExit(f"not solved after {options.episodes} episodes")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", help="the program environment_server")
    parser.add_argument("--environments", type=int, default=32, help="(default %(default)s)")
    parser.add_argument("--episodes", type=int, default=300, help="largest number of episodes (default %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=200, help="largest number of steps in an episode (default %(default)s)"
    )
    parser.add_argument("--target", type=float, default=150, help="mean steps (default %(default)s)")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([options.server, str(port)])
    backend_options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc("agent", rank=0, world_size=2, rpc_backend_options=backend_options)
    environments = rpc.remote("environments", cpp_function("makeEnvironments"), args=(options.environments, 0))
    learn(environments, options)
    del environments
    rpc.shutdown()
    raise SystemExit(server.wait())


if __name__ == "__main__":
    main()
