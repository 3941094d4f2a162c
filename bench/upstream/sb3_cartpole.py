"""stable-baselines3's PPO on CartPole, trained until it balances, for `bench/classic.py`.

Runs in a virtual environment with `stable-baselines3`, with the settings of rl-baselines3-zoo. It
is judged as our run judges itself, and stops by the same rule. Each line of standard input is a
task as JSON: seed, evaluate_every (steps), num_games, num_games_confirm, target, and judged_from,
the seed of the first game of the final judgement. The answer is one line of JSON.
"""

import json
import sys
import time

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

ENV_ID = "CartPole-v1"
TOTAL_STEPS = 100_000
NUM_JUDGED = 100
SIDE_BY_SIDE = 32


def falling_from(value):
    """A schedule that falls to zero, linearly."""
    return lambda left: left * value


def returns_of(model, first_seed, num_games, environments):
    """The returns of as many greedy games, one for each seed."""
    returns = []
    for begin in range(0, num_games, SIDE_BY_SIDE):
        num = min(SIDE_BY_SIDE, num_games - begin)
        environments.seed(first_seed + begin)
        observations = environments.reset()
        totals, done = [0.0] * SIDE_BY_SIDE, [False] * SIDE_BY_SIDE
        while not all(done[:num]):
            actions, _ = model.predict(observations, deterministic=True)
            observations, rewards, ended, _ = environments.step(actions)
            for place in range(num):
                if not done[place]:
                    totals[place] += float(rewards[place])
                    done[place] = bool(ended[place])
        returns += totals[:num]
    return returns


class Stop(BaseCallback):
    """Ends training once few games of the policy reach the target, and then more games."""

    def __init__(self, task, environments):
        super().__init__()
        self.task, self.environments = task, environments
        self.evaluation_s = 0.0
        self.next_at = task["evaluate_every"]
        self.has_reached_target = False

    def mean(self, first_seed, num_games):
        """The mean return of so many games."""
        return sum(returns_of(self.model, first_seed, num_games, self.environments)) / num_games

    def _on_step(self):
        return not self.has_reached_target

    def _on_rollout_start(self):
        """After an update, which is when a policy is new."""
        if self.num_timesteps < self.next_at:
            return
        self.next_at += self.task["evaluate_every"]
        begun_s = time.perf_counter()
        task = self.task
        first, target = task["judged_from"], task["target"]
        self.has_reached_target = (
            self.mean(first, task["num_games"]) >= target
            and self.mean(first + NUM_JUDGED, task["num_games_confirm"]) >= target
        )
        self.evaluation_s += time.perf_counter() - begun_s


def run(task):
    """What one training came to."""
    environments = make_vec_env(ENV_ID, n_envs=8, seed=task["seed"])
    judged = make_vec_env(ENV_ID, n_envs=SIDE_BY_SIDE, seed=0)
    model = PPO(
        "MlpPolicy",
        environments,
        n_steps=32,
        batch_size=256,
        gae_lambda=0.8,
        gamma=0.98,
        n_epochs=20,
        ent_coef=0.0,
        learning_rate=falling_from(1e-3),
        clip_range=falling_from(0.2),
        seed=task["seed"],
        device="cpu",
    )
    stop = Stop(task, judged)
    begun_s, begun_core_s = time.perf_counter(), time.process_time()
    model.learn(total_timesteps=TOTAL_STEPS, callback=stop)
    training_s = time.perf_counter() - begun_s - stop.evaluation_s
    returns = returns_of(model, task["judged_from"], NUM_JUDGED, judged)
    return {
        "mean_return": sum(returns) / len(returns),
        "num_env_steps": model.num_timesteps,
        "training_s": training_s,
        "total_s": time.perf_counter() - begun_s,
        "core_s": time.process_time() - begun_core_s,
    }


def main():
    """Answers tasks until standard input ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
