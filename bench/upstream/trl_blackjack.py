"""TRL's GRPOTrainer at blackjack: what `bench/speedup.py` compares with.

Runs in a virtual environment with `trl`, on whole games through `rollout_func`. Written as
cheaply as TRL allows: games are played all at once, in this process or over WebSocket on a server,
with a KV cache; nothing is logged; the clock stands still while weights are written for the judge.
Settings are those that were found best for TRL: groups of 16, 512 games a round, 4 minibatches,
learning rate 1e-3, entropy bonus 0.07. (It decides: with 0.05 one seed of three arrives at 41 %,
and two stay at 40 %; with 0.07 all three arrive; with 0.1 one does, and two drift into words that
are no move. On one seed: without a bonus it stays at 40 %; half the learning rate is slower; a
divergence from the starting policy in the bonus's place arrives no earlier.)
Arguments: model folder, output folder, seed, rounds, rounds between snapshots, and the address of a
server, where the games are not to be played in this process.
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
MAX_ANSWER_TOKENS = 4
MAX_TOKENS = 256
INVALID_REWARD = -1.0


class InProcess:
    """Games in this process, numbered from 0."""

    def __init__(self, num_games):
        self.environments = [OpenSpielEnvironment(game="blackjack") for _ in range(num_games)]
        self.observations = [None] * num_games

    def deal(self, seeds):
        """The messages that each game begins with."""
        for game, seed in enumerate(seeds):
            self.observations[game] = self.environments[game].reset(seed=seed).observation
        return [self.shown(game, first=True) for game in range(len(seeds))]

    def answer(self, games, texts):
        """(reward, messages) of each answer; None where it was no move, no messages at the end."""
        return [self.answer_one(game, text) for game, text in zip(games, texts, strict=True)]

    def answer_one(self, game, text):
        """What one answer leads to."""
        environment = self.environments[game]
        try:
            action = environment.text_renderer.parse(text, self.observations[game])
            result = environment.step(action)
        except ActionError:
            return None, None
        self.observations[game] = result.observation
        is_over = result.terminated or result.truncated
        return result.reward or 0.0, None if is_over else self.shown(game, first=False)

    def shown(self, game, *, first):
        """The game as text."""
        renderer = self.environments[game].text_renderer
        return renderer.render(self.observations[game], first=first)


class OverTheWire:
    """The same games on a server, one WebSocket each."""

    def __init__(self, address, num_games):
        self.client = EnvClient.connect(address)
        self.sessions = [self.client.open_session() for _ in range(num_games)]

    def deal(self, seeds):
        """The messages that each game begins with."""

        async def reset_all():
            resets = zip(self.sessions, seeds, strict=True)
            return await asyncio.gather(
                *(session.asynchronous.reset(seed=seed) for session, seed in resets)
            )

        return [result.text.messages for result in self.client.loop.run(reset_all())]

    def answer(self, games, texts):
        """(reward, messages) of each answer; None where it was no move, no messages at the end."""

        async def step_all():
            steps = zip(games, texts, strict=True)
            return await asyncio.gather(
                *(self.sessions[game].asynchronous.step(text=text) for game, text in steps),
                return_exceptions=True,
            )

        return [self.outcome(result) for result in self.client.loop.run(step_all())]

    def outcome(self, result):
        """What one answer led to."""
        if isinstance(result, ActionError):
            return None, None
        if isinstance(result, Exception):
            raise result
        return result.reward or 0.0, None if result.done else result.text.messages


class Game:
    """One game's tokens."""

    def __init__(self, number, prompt_ids):
        self.number = number
        self.prompt_ids = prompt_ids
        self.token_ids = list(prompt_ids)
        self.logprobs = []
        self.mask = []
        self.reward = 0.0
        self.is_over = False

    def say(self, token_ids, logprobs):
        """Takes what the policy has sampled."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.mask += [1] * len(token_ids)

    def hear(self, reward, added):
        """Takes what came of it: None is no move, and no tokens are added after the end."""
        self.reward = INVALID_REWARD if reward is None else self.reward + reward
        self.is_over = added is None
        if added is not None:
            self.token_ids += added
            self.logprobs += [0.0] * len(added)
            self.mask += [0] * len(added)


class Rollouts:
    """TRL's rollout_func: plays a round's games to their end."""

    def __init__(self, tokenizer, seed, table):
        self.tokenizer = tokenizer
        self.seeds = itertools.count(seed * 1_000_003)
        self.table = table
        self.texts = {}

    def __call__(self, prompts, trainer):
        """prompt_ids, completion_ids, logprobs, env_mask and game_return of each prompt."""
        num_groups = len(prompts) // GROUP_SIZE
        seeds = [seed for seed in itertools.islice(self.seeds, num_groups) for _ in range(16)]
        dealt = self.table.deal(seeds)
        games = [Game(number, list(self.encoded(shown))) for number, shown in enumerate(dealt)]
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.eval()
        while waiting := [game for game in games if not game.is_over]:
            by_length = defaultdict(list)
            for game in waiting:
                by_length[len(game.token_ids)].append(game)
            for same_length in by_length.values():
                self.answer(model, same_length)
        model.train()
        return {
            "prompt_ids": [game.prompt_ids for game in games],
            "completion_ids": [game.token_ids[len(game.prompt_ids) :] for game in games],
            "logprobs": [game.logprobs for game in games],
            "env_mask": [game.mask for game in games],
            "game_return": [game.reward for game in games],
        }

    @torch.inference_mode()
    def answer(self, model, games):
        """Samples one answer for each of the games, whose texts are equally long."""
        cache = DynamicCache(config=model.config)
        ids = torch.tensor([game.token_ids for game in games])
        answers = [([], []) for _ in games]
        alive = list(range(len(games)))
        while alive:
            output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logprobs = torch.log_softmax(output.logits[:, -1].float(), dim=-1)
            sampled = torch.multinomial(logprobs.exp(), 1)
            chosen = logprobs.gather(1, sampled)
            kept = []
            for row, index in enumerate(alive):
                token_ids, token_logprobs = answers[index]
                token_ids.append(int(sampled[row]))
                token_logprobs.append(float(chosen[row]))
                ended = token_ids[-1] == self.tokenizer.eos_token_id
                if not ended and len(token_ids) < MAX_ANSWER_TOKENS:
                    kept.append(row)
            if not kept:
                break
            if len(kept) < len(alive):
                cache.batch_select_indices(torch.tensor(kept))
            ids = sampled[torch.tensor(kept)]
            alive = [alive[row] for row in kept]
        texts = []
        for game, answer in zip(games, answers, strict=True):
            game.say(*answer)
            texts.append(self.tokenizer.decode(answer[0], skip_special_tokens=True))
        outcomes = self.table.answer([game.number for game in games], texts)
        for game, (reward, shown) in zip(games, outcomes, strict=True):
            # The template of this model only ever appends.
            game.hear(reward, None if shown is None else list(self.encoded(shown)))

    def encoded(self, messages):
        """The messages through the chat template; the few different ones are kept."""
        key = tuple((message["role"], message["content"]) for message in messages)
        if key not in self.texts:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            self.texts[key] = self.tokenizer.encode(text, add_special_tokens=False)
        return self.texts[key]


class Snapshots(TrainerCallback):
    """Writes the weights now and then, off the clock."""

    def __init__(self, model, folder, every_steps):
        self.model, self.folder, self.every_steps = model, folder, every_steps
        self.begun = self.off_clock_s = 0.0
        self.seconds = {}

    def on_train_begin(self, args, state, control, **kwargs):
        """Starts the clock."""
        self.begun = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        """Stops the clock while a snapshot is written."""
        if state.global_step % self.every_steps:
            return
        paused = time.perf_counter()
        round_index = state.global_step // NUM_MINIBATCHES
        self.seconds[round_index] = paused - self.begun - self.off_clock_s
        weights = {k: v.detach().clone() for k, v in self.model.named_parameters()}
        save_file(weights, self.folder / f"round-{round_index:05d}.safetensors")
        self.off_clock_s += time.perf_counter() - paused


def main():
    """Trains, and writes snapshots and seconds.json."""
    model_path, output, seed, num_rounds, snapshot_every, *addresses = sys.argv[1:]
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # two are slower for a model of this size
    torch.manual_seed(int(seed))
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    snapshots = Snapshots(model, folder, int(snapshot_every) * NUM_MINIBATCHES)
    table = InProcess(GAMES_PER_ROUND)
    if addresses:
        table = OverTheWire(*addresses, GAMES_PER_ROUND)
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
