"""Blackjack with TRL's GRPOTrainer, the baseline of `bench/speedup.py`.

Runs in a virtual environment with `trl` and plays whole games in `rollout_func`. The program is as
fast as TRL allows: all games are played in parallel, in this process or over WebSocket on a server,
with a KV cache; nothing is logged; the clock is paused while weights are saved for the evaluation.
The settings are the best found for TRL: groups of 16, 512 games per round, 4 minibatches, learning
rate 1e-3 and entropy bonus 0.07. The entropy bonus matters most. With 0.05, one of three seeds
reaches 41 % and two stay at 40 %. With 0.07, all three reach it. With 0.1, one reaches it and two
drift to text that is not a move. On one seed, no bonus stays at 40 %, half the learning rate is
slower, and a KL penalty instead of the bonus is not faster.
Arguments: model folder, output folder, seed, rounds, rounds between snapshots, and optionally the
address of a server for the games.
"""

import asyncio
import itertools
import json
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from ludus.env.client import EnvClient
from ludus.proto.errors import ActionError
from openspiel_env.server.openspiel_environment import OpenSpielEnvironment

GROUP_SIZE = 16
GAMES_PER_ROUND = 512
NUM_MINIBATCHES = 4
MAX_COMPLETION_TOKENS = 4
MAX_TOKENS = 256
INVALID_REWARD = -1.0


class LocalGames:
    """Games in this process, by index."""

    def __init__(self, num_games):
        self.environments = [OpenSpielEnvironment(game="blackjack") for _ in range(num_games)]
        self.observations = [None] * num_games

    def reset(self, seeds):
        """Start all games and return their first messages."""
        for game, seed in enumerate(seeds):
            self.observations[game] = self.environments[game].reset(seed=seed).observation
        return [self.render(game, first=True) for game in range(len(seeds))]

    def step(self, games, texts):
        """Return (reward, messages) for each completion.

        The reward is None for a text that is not a move; messages are None at the end of a game.
        """
        return [self.step_game(game, text) for game, text in zip(games, texts, strict=True)]

    def step_game(self, game, text):
        """Apply one completion and return (reward, messages)."""
        environment = self.environments[game]
        try:
            action = environment.text_renderer.parse(text, self.observations[game])
            result = environment.step(action)
        except ActionError:
            return None, None
        self.observations[game] = result.observation
        is_over = result.terminated or result.truncated
        return result.reward or 0.0, None if is_over else self.render(game, first=False)

    def render(self, game, *, first):
        """Return the messages for a game's observation."""
        renderer = self.environments[game].text_renderer
        return renderer.render(self.observations[game], first=first)


class RemoteGames:
    """Games on a server, with one WebSocket per game."""

    def __init__(self, address, num_games):
        self.client = EnvClient.connect(address)
        self.sessions = [self.client.open_session() for _ in range(num_games)]

    def reset(self, seeds):
        """Start all games and return their first messages."""

        async def reset_all():
            resets = zip(self.sessions, seeds, strict=True)
            return await asyncio.gather(
                *(session.async_counterpart.reset(seed=seed) for session, seed in resets)
            )

        return [result.text.messages for result in self.client.loop_thread.run(reset_all())]

    def step(self, games, texts):
        """Return (reward, messages) for each completion.

        The reward is None for a text that is not a move; messages are None at the end of a game.
        """

        async def step_all():
            steps = zip(games, texts, strict=True)
            return await asyncio.gather(
                *(self.sessions[game].async_counterpart.step(text=text) for game, text in steps),
                return_exceptions=True,
            )

        return [self.convert(result) for result in self.client.loop_thread.run(step_all())]

    def convert(self, result):
        """Convert a result to (reward, messages)."""
        if isinstance(result, ActionError):
            return None, None
        if isinstance(result, Exception):
            raise result
        return result.reward or 0.0, None if result.done else result.text.messages


class Game:
    """The tokens of one game."""

    def __init__(self, number, prompt_ids):
        self.number = number
        self.prompt_ids = prompt_ids
        self.token_ids = list(prompt_ids)
        self.logprobs = []
        self.mask = []
        self.reward = 0.0
        self.is_over = False

    def add_completion(self, token_ids, logprobs):
        """Append sampled tokens."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.mask += [1] * len(token_ids)

    def add_result(self, reward, added):
        """Append the result of a completion; `added` is None at the end of the game."""
        self.reward = INVALID_REWARD if reward is None else self.reward + reward
        self.is_over = added is None
        if added is not None:
            self.token_ids += added
            self.logprobs += [0.0] * len(added)
            self.mask += [0] * len(added)


class Rollouts:
    """TRL's rollout_func, which plays the games of a round."""

    def __init__(self, tokenizer, seed, table):
        self.tokenizer = tokenizer
        self.seeds = itertools.count(seed * 1_000_003)
        self.table = table
        self.texts = {}

    def __call__(self, prompts, trainer):
        """Return prompt_ids, completion_ids, logprobs, env_mask and game_return for each prompt."""
        num_groups = len(prompts) // GROUP_SIZE
        seeds = [seed for seed in itertools.islice(self.seeds, num_groups) for _ in range(16)]
        prompt_messages = self.table.reset(seeds)
        games = [
            Game(number, list(self.encode(messages)))
            for number, messages in enumerate(prompt_messages)
        ]
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.eval()
        while active := [game for game in games if not game.is_over]:
            by_length = defaultdict(list)
            for game in active:
                by_length[len(game.token_ids)].append(game)
            for same_length in by_length.values():
                self.sample(model, same_length)
        model.train()
        return {
            "prompt_ids": [game.prompt_ids for game in games],
            "completion_ids": [game.token_ids[len(game.prompt_ids) :] for game in games],
            "logprobs": [game.logprobs for game in games],
            "env_mask": [game.mask for game in games],
            "game_return": [game.reward for game in games],
        }

    @torch.inference_mode()
    def sample(self, model, games):
        """Sample one completion for each game; the games have the same number of tokens."""
        cache = DynamicCache(config=model.config)
        ids = torch.tensor([game.token_ids for game in games])
        completions = [([], []) for _ in games]
        alive = list(range(len(games)))
        while alive:
            output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logprobs = torch.log_softmax(output.logits[:, -1].float(), dim=-1)
            sampled = torch.multinomial(logprobs.exp(), 1)
            chosen = logprobs.gather(1, sampled)
            kept = []
            for row, index in enumerate(alive):
                token_ids, token_logprobs = completions[index]
                token_ids.append(int(sampled[row]))
                token_logprobs.append(float(chosen[row]))
                ended = token_ids[-1] == self.tokenizer.eos_token_id
                if not ended and len(token_ids) < MAX_COMPLETION_TOKENS:
                    kept.append(row)
            if not kept:
                break
            if len(kept) < len(alive):
                cache.batch_select_indices(torch.tensor(kept))
            ids = sampled[torch.tensor(kept)]
            alive = [alive[row] for row in kept]
        texts = []
        for game, completion in zip(games, completions, strict=True):
            game.add_completion(*completion)
            texts.append(self.tokenizer.decode(completion[0], skip_special_tokens=True))
        outcomes = self.table.step([game.number for game in games], texts)
        for game, (reward, messages) in zip(games, outcomes, strict=True):
            # This model's chat template only appends.
            game.add_result(reward, None if messages is None else list(self.encode(messages)))

    def encode(self, messages):
        """Return the tokens of messages in the chat template, from a cache."""
        key = tuple((message["role"], message["content"]) for message in messages)
        if key not in self.texts:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            self.texts[key] = self.tokenizer.encode(text, add_special_tokens=False)
        return self.texts[key]


class Snapshots(TrainerCallback):
    """Saves the weights at intervals; saving is not timed."""

    def __init__(self, model, folder, every_steps):
        self.model, self.folder, self.every_steps = model, folder, every_steps
        self.start_s = self.paused_s = 0.0
        self.seconds = {}

    def on_train_begin(self, args, state, control, **kwargs):
        """Start the clock."""
        self.start_s = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        """Save a snapshot while the clock is paused."""
        if state.global_step % self.every_steps:
            return
        pause_start_s = time.perf_counter()
        round_index = state.global_step // NUM_MINIBATCHES
        self.seconds[round_index] = pause_start_s - self.start_s - self.paused_s
        weights = {k: v.detach().clone() for k, v in self.model.named_parameters()}
        save_file(weights, self.folder / f"round-{round_index:05d}.safetensors")
        self.paused_s += time.perf_counter() - pause_start_s


def main():
    """Train, and write snapshots and seconds.json."""
    model_path, output, seed, num_rounds, snapshot_every, *addresses = sys.argv[1:]
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # two threads are slower for a model of this size
    torch.manual_seed(int(seed))
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    snapshots = Snapshots(model, folder, int(snapshot_every) * NUM_MINIBATCHES)
    table = LocalGames(GAMES_PER_ROUND)
    if addresses:
        table = RemoteGames(*addresses, GAMES_PER_ROUND)
    num_prompts = int(num_rounds) * GAMES_PER_ROUND // GROUP_SIZE
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completions, game_return, **_: game_return,
        rollout_func=Rollouts(tokenizer, int(seed), table),
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": f"deal {i}"}]} for i in range(num_prompts)]
        ),
        callbacks=[snapshots],
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=GAMES_PER_ROUND // NUM_MINIBATCHES,
            generation_batch_size=GAMES_PER_ROUND,
            num_generations=GROUP_SIZE,
            max_steps=int(num_rounds) * NUM_MINIBATCHES,
            max_completion_length=MAX_TOKENS,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            entropy_coef=0.07,
            temperature=1.0,
            seed=int(seed),
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    (folder / "seconds.json").write_text(json.dumps(snapshots.seconds))


if __name__ == "__main__":
    main()
