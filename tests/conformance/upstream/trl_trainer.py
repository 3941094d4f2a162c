"""Program that trains with TRL's GRPOTrainer on our server, with trl and openenv installed.

OpenEnv's client plays the games over WebSocket. TRL calls it through `rollout_func` or
`environment_factory`. The tiny model was trained only to call the tool.
Arguments: address, "rollout_func" or "environment_factory", working folder. Prints the games (seed,
actions, rewards), the number of optimizer steps and the rewards that TRL logged, as JSON.
"""

import itertools
import json
import sys
from importlib.resources import files

import torch
from datasets import Dataset
from openenv.core import GenericEnvClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

NUM_GENERATIONS = 4
NUM_STEPS = 2
TOOL_CALL = '<tool_call>\n{"name": "play", "arguments": {"action": 1}}\n</tool_call><|im_end|>'
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
GAMES = []


class Blackjack:
    """A client that plays one game at a time on the server."""

    address = ""

    def __init__(self):
        self.client = GenericEnvClient(base_url=self.address).sync()
        self.client.__enter__()

    def reset(self, seed, **columns):
        """Start a game and return its phase."""
        self.game = {"seed": seed, "actions": [], "rewards": []}
        GAMES.append(self.game)
        self.is_over = False
        observation = self.client.reset(seed=seed).observation
        return f" Phase: {observation['game_phase']}."

    def play(self, action: int) -> str:
        """
        Play a move.

        Args:
            action: 0 is hit, 1 is stand.
        """
        if self.is_over:
            raise ValueError("the game is over")
        result = self.client.step({"action_id": action})
        self.game["actions"].append(action)
        self.game["rewards"].append(result.reward)
        self.is_over = result.done
        return "over" if result.done else "go on"

    def get_reward(self):
        """Return the reward of the episode."""
        return sum(reward or 0.0 for reward in self.game["rewards"])


def make_tokenizer():
    """Return a byte-level tokenizer with Qwen's chat template and special tokens."""
    bpe_tokenizer = Tokenizer(models.BPE())
    bpe_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe_tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    bpe_tokenizer.train_from_iterator([TOOL_CALL], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe_tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    template = files("trl") / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def make_model(tokenizer):
    """Return a small Qwen3 model with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def train_tool_call(model, tokenizer):
    """Train the model to respond to any prompt with the tool call."""
    completion_ids = tokenizer.encode(TOOL_CALL, add_special_tokens=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for phase in itertools.islice(itertools.cycle(["initial", "x", "decide"]), 90):
        messages = [{"role": "user", "content": f"Play. Phase: {phase}."}]
        prompt = tokenizer.apply_chat_template(
            messages, tools=[Blackjack.play], add_generation_prompt=True, tokenize=False
        )
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        ids = torch.tensor([prompt_ids + completion_ids])
        labels = torch.tensor([[-100] * len(prompt_ids) + completion_ids])
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def rollout_func(prompts, trainer):
    """Play a game for each prompt and return TRL's columns. A token's parity is the action."""
    tokenizer, columns = trainer.processing_class, {"prompt_ids": [], "completion_ids": []}
    columns |= {"logprobs": [], "game_return": []}
    game_client = Blackjack()
    for prompt in prompts:
        game_client.reset(seed=int(prompt.rpartition(" ")[2]))
        prompt_ids, sampled_ids, logprobs = tokenizer.encode(prompt), [], []
        while not game_client.is_over:
            with torch.no_grad():
                logits = trainer.model(torch.tensor([prompt_ids + sampled_ids])).logits[0, -1]
            token_logprobs = torch.log_softmax(logits.float(), dim=-1)
            token = int(torch.multinomial(token_logprobs.exp(), 1))
            sampled_ids.append(token)
            logprobs.append(float(token_logprobs[token]))
            game_client.play(token % 2)
        columns["prompt_ids"].append(prompt_ids)
        columns["completion_ids"].append(sampled_ids)
        columns["logprobs"].append(logprobs)
        columns["game_return"].append(game_client.get_reward())
    return columns


def main(address, mode, folder):
    """Train, and print the games, steps and rewards."""
    Blackjack.address = address
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    uses_tools = mode == "environment_factory"
    if uses_tools:
        train_tool_call(model, tokenizer)
    seeds = list(range(100, 100 + NUM_STEPS))
    prompts = [
        [{"role": "user", "content": "Play."}] if uses_tools else f"Play game {seed}"
        for seed in seeds
    ]
    arguments = (
        {"environment_factory": Blackjack}
        if uses_tools
        else {
            "rollout_func": rollout_func,
            "reward_funcs": lambda completions, game_return, **_: game_return,
        }
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts, "seed": seeds}),
        args=GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=NUM_GENERATIONS,
            num_generations=NUM_GENERATIONS,
            max_completion_length=96,
            max_tool_calling_iterations=1,
            max_steps=NUM_STEPS,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        **arguments,
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    played_games = [game for game in GAMES if game["actions"]]
    steps = trainer.state.global_step
    sys.stdout.write(json.dumps({"games": played_games, "steps": steps, "rewards": rewards}))


if __name__ == "__main__":
    main(*sys.argv[1:])
