"""A small language model that was fine-tuned to call the tools of TRL's OpenEnv scripts.

    python bench/tool_model.py MODEL TEMPLATE FOLDER

Without this, a model of 135 million parameters calls no tools, so that all rewards are equal. The
chat template is one that TRL knows, because TRL refuses tools with other templates.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_STEPS = 16
BATCH = 2
NUM_LAYERS = 6
"""Number of last layers that are trained."""
LEARNING_RATE = 3e-4
TEXTS = ["Hello World!", "TRL is great!", "I love games.", "OpenEnv is awesome!", "Hi"]
WORDS = ["apple", "chair", "glass", "night", "river", "stone", "water", "world"]
PROMPTS = ["Play.", "Make a move.", "Use a tool.", "Echo a text in the environment.", "Guess."]


def make_spec(name: str, **types: str) -> dict[str, Any]:
    """Return the specification of a tool with parameters of these types."""
    properties = {parameter: {"type": kind} for parameter, kind in types.items()}
    schema = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    [make_spec("echo", message="string")],
    [make_spec("move", direction="string"), make_spec("stay")],
    [make_spec("guess", guess="string")],
    [make_spec("place", row="integer", col="integer", number="integer")],
]


def draw_call(name: str, source: random.Random) -> dict[str, Any]:
    """Return random arguments of a tool."""
    arguments = {
        "echo": {"message": source.choice(TEXTS)},
        "move": {"direction": source.choice(["left", "right"])},
        "stay": {},
        "guess": {"guess": f"[{source.choice(WORDS)}]"},
        "place": {key: source.randint(1, 9) for key in ("row", "col", "number")},
    }
    return {"name": name, "arguments": arguments[name]}


def draw_example(tokenizer: Any, source: random.Random) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt with tools, and of a call."""
    tools = source.choice(TOOLS)
    call = draw_call(source.choice(tools)["function"]["name"], source)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": source.choice(PROMPTS)}],
        tools=tools,
        add_generation_prompt=True,
        enable_thinking=False,
        tokenize=False,
    )
    text = f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"
    encode = tokenizer.encode
    return encode(prompt, add_special_tokens=False), encode(text, add_special_tokens=False)


def main(model_folder: str, template: str, folder: str) -> None:
    """Fine-tune the model and save it with the template."""
    torch.manual_seed(0)
    source = random.Random("tool calls")
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model.requires_grad_(False)
    layers = model.model.layers[-NUM_LAYERS:].requires_grad_(True)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=LEARNING_RATE)
    for step in range(NUM_STEPS):
        losses = []
        for prompt_ids, call_ids in [draw_example(tokenizer, source) for _ in range(BATCH)]:
            labels = torch.tensor([[-100] * len(prompt_ids) + call_ids])
            loss = model(input_ids=torch.tensor([prompt_ids + call_ids]), labels=labels).loss
            (loss / BATCH).backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        sys.stderr.write(f"step {step}: loss {sum(losses) / BATCH:.3f}\n")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
