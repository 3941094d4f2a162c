"""Sums of two numbers below 20, trained with TRL or with Ludus from one GRPOConfig.

Arguments: "trl" or "ludus", model folder, output folder, seed, steps, steps between evaluations,
share to reach, learning rate. Prints a JSON object with the seconds of training, the share of
held-back questions with a right answer and the number of steps, for each evaluation.

Both trainers get the same rows, reward function, model, sampling and loss. Each optimizer step uses
64 new completions, 8 for each of 8 questions, sampled at temperature 1 with the newest weights. The
clock stops during evaluations. In Ludus it includes the delivery of the weights to the sampler,
because an evaluation would otherwise wait for it. Both use float32 and all cores.
"""

import asyncio
import json
import random
import re
import sys
import time
from contextlib import contextmanager

NUM_HELD_BACK = 80
MAX_COMPLETION_TOKENS = 16
QUESTION = "What is {} + {}? Answer with the number only."


def make_rows(pairs):
    """Return the rows of a data set, with the right answers."""
    return [
        {"prompt": [{"role": "user", "content": QUESTION.format(a, b)}], "answer": a + b}
        for a, b in pairs
    ]


def split_rows():
    """Return the rows for training and the held-back rows, which do not depend on the seed."""
    pairs = [(a, b) for a in range(20) for b in range(20)]
    random.Random("held-back sums").shuffle(pairs)
    return make_rows(pairs[NUM_HELD_BACK:]), make_rows(pairs[:NUM_HELD_BACK])


def is_right(text, answer):
    """Return whether the last number of the text is the answer."""
    numbers = re.findall(r"\d+", text)
    return bool(numbers) and int(numbers[-1]) == int(answer)


def score_answer(completions, answer, **_):
    """Return 1 for a right answer and 0 otherwise."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(is_right(text, right)) for text, right in zip(texts, answer, strict=True)]


def make_settings(folder, seed, num_steps, learning_rate):
    """Return the fields of both GRPOConfigs."""
    return {
        "output_dir": folder,
        "seed": seed,
        "max_steps": num_steps,
        "learning_rate": learning_rate,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 64,
        "num_generations": 8,
        "num_iterations": 1,
        "max_completion_length": MAX_COMPLETION_TOKENS,
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
    }


class Course:
    """The evaluations of a training, and a clock that only counts training."""

    def __init__(self, every_steps, goal, rows):
        self.points = []
        self.every_steps = every_steps
        self.goal = goal
        self.rows = rows
        self.seconds = 0.0

    @contextmanager
    def count(self):
        """Add the duration of the block to the seconds of training."""
        start_s = time.monotonic()
        yield
        self.seconds += time.monotonic() - start_s

    def add(self, step, texts):
        """Record an evaluation; return whether the goal is reached."""
        answers = [row["answer"] for row in self.rows]
        share = sum(map(is_right, texts, answers)) / len(answers)
        self.points.append({"step": step, "seconds": self.seconds, "share": share})
        sys.stderr.write(f"step {step}, {self.seconds:.1f} s: {share:.2%}\n")
        return share >= self.goal


def train_with_trl(model, settings, rows, course):
    """Train with TRL's GRPOTrainer."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    def answer_questions(policy, tokenizer):
        prompts = [row["prompt"] for row in course.rows]
        encoded = tokenizer.apply_chat_template(
            prompts,
            add_generation_prompt=True,
            padding=True,
            padding_side="left",
            return_tensors="pt",
            return_dict=True,
        )
        with torch.no_grad():
            ids = policy.generate(
                **encoded, max_new_tokens=MAX_COMPLETION_TOKENS, do_sample=False, use_cache=True
            )
        num_prompt_tokens = encoded["input_ids"].shape[1]
        return tokenizer.batch_decode(ids[:, num_prompt_tokens:], skip_special_tokens=True)

    class Evaluation(TrainerCallback):
        """The evaluations, for which the clock stops."""

        def on_train_begin(self, args, state, control, **_):
            """Start the clock."""
            self.start_s = time.monotonic()

        def on_step_end(self, args, state, control, model=None, processing_class=None, **_):
            """Evaluate the policy when due."""
            course.seconds += time.monotonic() - self.start_s
            if state.global_step % course.every_steps == 0:
                model.eval()
                texts = answer_questions(model, processing_class)
                model.train()
                control.should_training_stop = course.add(state.global_step, texts)
            self.start_s = time.monotonic()

    args = GRPOConfig(
        **settings, disable_tqdm=True, model_init_kwargs={"dtype": "float32"}, shuffle_dataset=True
    )
    trainer = GRPOTrainer(
        model=model,
        args=args,
        reward_funcs=score_answer,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Evaluation()],
    )
    course.add(0, answer_questions(trainer.model, trainer.processing_class))
    trainer.train()


def train_with_ludus(model, settings, rows, course):
    """Train with a run of Ludus that has the settings of a GRPOConfig."""
    from ludus.trainer import Trainer
    from ludus.trainer.compat.trl import GRPOConfig, GRPOTrainer

    script = GRPOTrainer(
        model=model, args=GRPOConfig(**settings), reward_funcs=score_answer, train_dataset=rows
    )
    script.write_rows()

    async def answer_questions(policy):
        prompts = [row["prompt"] for row in course.rows]
        calls = [policy.generate(prompt, temperature=0.0) for prompt in prompts]
        return [texts[0] for texts in await asyncio.gather(*calls)]

    async def train():
        async with Trainer(script.run, overwrite=True) as trainer:
            course.add(0, await answer_questions(trainer.policy))
            steps = trainer.steps()
            while True:
                with course.count():
                    step = await anext(steps, None)
                    await trainer.policy.wait_for_weights()
                if step is None:
                    return
                if step.number % course.every_steps == 0 and course.add(
                    step.number, await answer_questions(trainer.policy)
                ):
                    return

    asyncio.run(train())


def main(trainer, model, folder, seed, num_steps, every_steps, goal, learning_rate):
    """Train and print the course."""
    rows, held_back_rows = split_rows()
    settings = make_settings(folder, int(seed), int(num_steps), float(learning_rate))
    course = Course(int(every_steps), float(goal), held_back_rows)
    train = train_with_trl if trainer == "trl" else train_with_ludus
    train(model, settings, rows, course)
    sys.stdout.write(json.dumps({"points": course.points, "settings": settings}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
