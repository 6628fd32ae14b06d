"""CartPole solved by one agent and several observers that communicate by RPC.

Each observer has its own environment and plays episodes in it; for every step it requests an action from the agent and
reports the reward. The agent has the policy and improves it after each round of episodes, by policy gradient with a
learned baseline (Williams 1992; Sutton et al. 2000). The observers only have an RRef to the agent, so they can also run
on other machines.

Written for torch.distributed.rpc; runs unchanged on torchrpc:

    python reinforcement_learning.py                  # on torch's own RPC
    python -m torchrpc reinforcement_learning.py      # on torchrpc

The program ends when the mean reward of the last 100 episodes passes gymnasium's threshold for CartPole-v1 (475 of at
most 500) and saves the learning curve as PNG. The curve depends only on the seed, not on the timing of the processes.
"""

import argparse
import json
import os
import socket
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import gymnasium
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

ENVIRONMENT = "CartPole-v1"
WINDOW = 100  # episodes in the running mean
REWARD_UNIT = 0.01  # scales returns (at most 100 with gamma 0.99) to about 1, for the network's output


# --- The agent and its observers ---
# The observers play; the agent selects the actions. An observer calls the agent for every action, and the agent calls
# all observers for a round of episodes: calls go in both directions.


class Policy(nn.Module):
    """Maps states (..., 4) to log probabilities of the actions (..., 2) and expected returns (...)."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(4, 128)
        self.action = nn.Linear(128, 2)
        self.value = nn.Linear(128, 1)

    def forward(self, state):
        x = torch.tanh(self.hidden(state))
        return F.log_softmax(self.action(x), dim=-1), self.value(x).squeeze(-1)


class Observer:
    """Runs in an observer's process: plays episodes with the agent's actions."""

    def __init__(self, number, seed):
        self.number = number
        self.env = gymnasium.make(ENVIRONMENT)
        self.env.reset(seed=seed)

    def run_episode(self, agent_rref):
        """Play an episode. Return the state at the time limit, or None if the pole fell."""
        state, _ = self.env.reset()
        reported = None
        while True:
            action = agent_rref.rpc_sync().select_action(self.number, torch.from_numpy(state))
            state, reward, fell, time_is_up, _ = self.env.step(action)
            # The observer requests the next action while the report is under way. It sends one report at a time, so
            # that the rewards stay in order.
            if reported is not None:
                reported.wait()
            reported = agent_rref.rpc_async().report_reward(self.number, reward)
            if fell or time_is_up:
                reported.wait()
                return None if fell else torch.from_numpy(state)


@dataclass
class Episode:
    states: list = field(default_factory=list)
    actions: list = field(default_factory=list)
    rewards: list = field(default_factory=list)


class Agent:
    """Runs in the agent's process: has the policy, serves the observers' calls, and learns.

    Observers call at the same time, on several threads. Each observer has its own episode and random numbers, and the
    policy does not change while they play. So no lock is needed, and the timing of calls does not affect the result.
    """

    def __init__(self, observers, options):
        self.options = options
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=options.lr)
        seeds = [1000 * options.seed + number for number in range(observers)]
        self.random = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.observers = [
            rpc.remote(f"observer_{number}", Observer, args=(number, seed)) for number, seed in enumerate(seeds)
        ]
        self.rewards = []  # total reward of each episode so far

    def select_action(self, observer, state):
        with torch.no_grad():
            log_probabilities, _ = self.policy(state)
        action = torch.multinomial(log_probabilities.exp(), 1, generator=self.random[observer]).item()
        self.episodes[observer].states.append(state)
        self.episodes[observer].actions.append(action)
        return action

    def report_reward(self, observer, reward):
        self.episodes[observer].rewards.append(reward)

    def run_episode(self, agent_rref):
        """Let all observers play one episode each, at the same time."""
        self.episodes = [Episode() for _ in self.observers]
        futures = [observer.rpc_async().run_episode(agent_rref) for observer in self.observers]
        self.last_states = torch.futures.wait_all(futures)

    def finish_episode(self):
        """Learn from the episodes of all observers."""
        self.rewards += [sum(episode.rewards) for episode in self.episodes]
        states = torch.stack([state for episode in self.episodes for state in episode.states])
        actions = torch.tensor([action for episode in self.episodes for action in episode.actions])
        returns = torch.cat([self.returns(*played) for played in zip(self.episodes, self.last_states, strict=True)])

        log_probabilities, values = self.policy(states)
        advantages = returns - values.detach()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        chosen = log_probabilities.gather(1, actions.unsqueeze(1)).squeeze(1)
        entropy = -(log_probabilities.exp() * log_probabilities).sum(dim=1)
        loss = -(chosen * advantages).mean() + 0.5 * F.mse_loss(values, returns) - self.options.entropy * entropy.mean()

        # The learning rate decreases as the reward increases, so that a good policy is not lost again.
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * max(0.02, 1 - self.running_reward() / 500)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()

    def returns(self, episode, last_state):
        """Return the discounted sum of the rewards from each step on. At the time limit, add the expected return."""
        total = 0.0
        if last_state is not None:
            with torch.no_grad():
                total = self.policy(last_state)[1].item()
        returns = []
        for reward in reversed(episode.rewards):
            total = REWARD_UNIT * reward + self.options.gamma * total
            returns.append(total)
        return torch.tensor(returns[::-1])

    def running_reward(self):
        last = self.rewards[-WINDOW:]
        return sum(last) / len(last)

    def solved(self):
        return len(self.rewards) >= WINDOW and self.running_reward() >= self.options.target


# --- The processes ---
# The agent runs the training; the observers only serve its calls.


def run_agent(options, results):
    torch.manual_seed(options.seed)
    agent = Agent(options.observers, options)
    agent_rref = rpc.RRef(agent)
    # The bar is full when the problem is solved. How long that takes is not known, so no time is predicted.
    shown = "running reward {n:.0f} of {total:.0f} |{bar}| {elapsed}{postfix}"
    with tqdm(total=options.target, bar_format=shown) as bar:
        while not agent.solved() and len(agent.rewards) < options.episodes:
            agent.run_episode(agent_rref)
            agent.finish_episode()
            bar.set_postfix_str(f"{len(agent.rewards)} episodes", refresh=False)
            bar.update(min(agent.running_reward(), options.target) - bar.n)
    results.write_text(json.dumps(agent.rewards))


def run_worker(rank, options, results):
    torch.set_num_threads(1)  # the processes share the cores
    name = "agent" if rank == 0 else f"observer_{rank - 1}"
    rpc.init_rpc(name, rank=rank, world_size=1 + options.observers)
    if rank == 0:
        run_agent(options, results)
    # Observers only serve calls: shutdown returns when all workers have called it and no call is running.
    rpc.shutdown()


# --- The results ---
# The points are episodes; the line is the running mean, which must pass the threshold.


def plot(rewards, options):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.style.use("seaborn-v0_8-whitegrid")
    mean = [sum(rewards[max(0, i - WINDOW) : i]) / min(i, WINDOW) for i in range(1, len(rewards) + 1)]
    episodes = range(1, len(rewards) + 1)
    plt.figure(figsize=(8, 4.5))
    plt.plot(episodes, rewards, ".", markersize=3, alpha=0.4, label="episode")
    plt.plot(episodes, mean, linewidth=2, label=f"mean of the last {WINDOW}")
    plt.axhline(options.target, color="grey", linestyle="--", label=f"solved: {options.target:.0f}")
    plt.xlabel("episode")
    plt.ylabel("reward")
    plt.title(f"{ENVIRONMENT}, {options.observers} observers, seed {options.seed}")
    plt.legend()
    plt.tight_layout()
    plt.savefig(options.output, dpi=120)


# --- The command ---


def use_free_port():
    """Set the rendezvous address to a free port of this host, unless the environment sets it."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        os.environ.setdefault("MASTER_PORT", str(probe.getsockname()[1]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--observers", type=int, default=2, help="number of observer processes (default %(default)s)")
    parser.add_argument("--episodes", type=int, default=2000, help="largest number of episodes (default %(default)s)")
    parser.add_argument(
        "--target",
        type=float,
        default=gymnasium.spec(ENVIRONMENT).reward_threshold,
        help=f"mean reward of {WINDOW} episodes that counts as solved (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-2, help="learning rate at the start (default %(default)s)")
    parser.add_argument("--gamma", type=float, default=0.99, help="discount (default %(default)s)")
    parser.add_argument("--entropy", type=float, default=0.01, help="weight of the entropy bonus (default %(default)s)")
    parser.add_argument("--output", default="reinforcement_learning.png", help="the plot (default %(default)s)")
    options = parser.parse_args()

    use_free_port()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        mp.spawn(run_worker, args=(options, results), nprocs=1 + options.observers)
        rewards = json.loads(results.read_text())
    plot(rewards, options)
    running = sum(rewards[-WINDOW:]) / len(rewards[-WINDOW:])
    solved = len(rewards) >= WINDOW and running >= options.target
    print(
        f"{'solved' if solved else 'not solved'}: running reward {running:.1f} of {options.target:.0f} after "
        f"{len(rewards)} episodes, {sum(rewards):.0f} steps, {time.monotonic() - start:.0f} s; "
        f"curve in {options.output}"
    )
    return 0 if solved else 1


if __name__ == "__main__":
    raise SystemExit(main())
