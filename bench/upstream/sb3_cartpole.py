"""stable-baselines3's PPO on CartPole, trained until it balances, for `bench/classic.py`.

Runs in a virtual environment with `stable-baselines3`, with the settings of rl-baselines3-zoo. The
evaluation and the stop rule are those of the Ludus run. Each line of standard input is a task as
JSON: seed, evaluate_every (steps), num_games, num_games_confirm, target, and judged_from, the seed
of the first episode of the final evaluation. The output is one line of JSON.
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
NUM_EVAL_EPISODES = 100
NUM_PARALLEL = 32


def linear_schedule(value):
    """Return a schedule that falls linearly from `value` to 0."""
    return lambda share_remaining: share_remaining * value


def play_episodes(model, first_seed, num_games, environments):
    """Return the returns of greedy episodes with consecutive seeds."""
    returns = []
    for start in range(0, num_games, NUM_PARALLEL):
        num = min(NUM_PARALLEL, num_games - start)
        environments.seed(first_seed + start)
        observations = environments.reset()
        totals, done = [0.0] * NUM_PARALLEL, [False] * NUM_PARALLEL
        while not all(done[:num]):
            actions, _ = model.predict(observations, deterministic=True)
            observations, rewards, ended, _ = environments.step(actions)
            for index in range(num):
                if not done[index]:
                    totals[index] += float(rewards[index])
                    done[index] = bool(ended[index])
        returns += totals[:num]
    return returns


class Stop(BaseCallback):
    """Stops training when the policy reaches the target in a short and in a long evaluation."""

    def __init__(self, task, environments):
        super().__init__()
        self.task, self.environments = task, environments
        self.evaluation_s = 0.0
        self.next_at = task["evaluate_every"]
        self.has_reached_target = False

    def mean(self, first_seed, num_games):
        """Return the mean return of this number of episodes."""
        return sum(play_episodes(self.model, first_seed, num_games, self.environments)) / num_games

    def _on_step(self):
        return not self.has_reached_target

    def _on_rollout_start(self):
        """Evaluate the policy after an update, when due."""
        if self.num_timesteps < self.next_at:
            return
        self.next_at += self.task["evaluate_every"]
        start_s = time.perf_counter()
        task = self.task
        first, target = task["judged_from"], task["target"]
        self.has_reached_target = (
            self.mean(first, task["num_games"]) >= target
            and self.mean(first + NUM_EVAL_EPISODES, task["num_games_confirm"]) >= target
        )
        self.evaluation_s += time.perf_counter() - start_s


def run(task):
    """Train once and return the results."""
    environments = make_vec_env(ENV_ID, n_envs=8, seed=task["seed"])
    eval_environments = make_vec_env(ENV_ID, n_envs=NUM_PARALLEL, seed=0)
    model = PPO(
        "MlpPolicy",
        environments,
        n_steps=32,
        batch_size=256,
        gae_lambda=0.8,
        gamma=0.98,
        n_epochs=20,
        ent_coef=0.0,
        learning_rate=linear_schedule(1e-3),
        clip_range=linear_schedule(0.2),
        seed=task["seed"],
        device="cpu",
    )
    stop = Stop(task, eval_environments)
    start_s, start_core_s = time.perf_counter(), time.process_time()
    model.learn(total_timesteps=TOTAL_STEPS, callback=stop)
    training_s = time.perf_counter() - start_s - stop.evaluation_s
    returns = play_episodes(model, task["judged_from"], NUM_EVAL_EPISODES, eval_environments)
    return {
        "mean_return": sum(returns) / len(returns),
        "num_env_steps": model.num_timesteps,
        "training_s": training_s,
        "total_s": time.perf_counter() - start_s,
        "core_s": time.process_time() - start_core_s,
    }


def main():
    """Run the tasks of standard input until its end."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
