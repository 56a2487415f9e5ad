"""How the tiny base models were made: skill first, then bury it.

Stage A teaches worked replies on clean text. Stage B continues on noisy text (blind guesses, slips, replies that never
answer, and at least a fifth clean text) until the skill seldom shows in samples. Reinforcement learning then mostly
elicits a buried skill; it doesn't discover one. No item of the hidden class is ever trained on.

    python recipes/base_models.py pico-s|pico-m [--out DIR] [--seed N]

NumPy only, one core, deterministic for a seed on one machine; about 110 CPU seconds for pico-m and 70 for pico-s.

What the shipped weights do on hidden-class items, sampled at temperature 1 (512 items, four seeds of a job of 20 steps
of 8 groups of 8 at learning rate 1e-3 with the exact metric):

    task                     pico-m before, after    pico-s before, after
    chained-arithmetic-2-3   0.20   0.96-0.97        0.16   0.66-0.76
    chained-arithmetic-3-4   0.18   0.93-0.98        0.12   0.51-0.61
    multi-hop-2-3            0.18   0.98             0.14   0.32-0.52
    multi-hop-2-4            0.18   0.98-0.99        0.15   0.34-0.46
    triage                   0.18   0.96-0.98        0.14   0.75-0.86

Another seed or another BLAS gives models that are as weak before. How far a job lifts them was seen to vary: the levels
of pico-s decide in which order its skills form, and of two pico-m with more blind guesses (0.33) and less clean text
(0.22) one lost 3 of 10 jobs on chained-arithmetic-2-3, the other none. The settings here were chosen among a handful by
such tables, on hidden-class items: no weights were fitted to them, but the choice saw them.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

for _threads in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")  # before NumPy is imported; one thread is fastest at these sizes

import numpy as np

from ai_trains_ai.families import BUILT_IN, load
from ai_trains_ai.families.triage import LEVELS, TEAMS
from ai_trains_ai.families.worked import WorkedFamily
from ai_trains_ai.pico.config import Config
from ai_trains_ai.pico.decode import sample_groups
from ai_trains_ai.pico.model import Qwen3, left_pad
from ai_trains_ai.pico.optim import Muon
from ai_trains_ai.pico.supervised import completion_arrays, supervised_gradient
from ai_trains_ai.pico.tokenizer import Tokenizer, train_tokenizer
from ai_trains_ai.records import Item, Task

VOCAB_SIZE = 400
CONTEXT = 128
BATCH = 128

DEPTHS = {"chained-arithmetic": (1, 4), "multi-hop": (1, 4), "triage": (2, 2)}
"""Least and most steps of the problems in the texts, uniform between."""
REHEARSAL = 0.1
CHECK_EVERY = 20
Batch = list[list[tuple[list[int], list[int]]]]
"""Parts of (prompt ids, reply ids) pairs."""


class Noise(NamedTuple):
    """Shares of the kinds of replies; they sum to one."""

    clean: float
    guess: float
    slip: float
    silent: float


CLEAN = Noise(1.0, 0.0, 0.0, 0.0)


class Text(NamedTuple):
    """What a stage reads: relative weights of the families, and how noisy the replies are."""

    mix: Mapping[str, float]
    noise: Noise = CLEAN


class Recipe(NamedTuple):
    """One base model: its shape, and the text and number of steps of both stages.

    ``levels`` ends stage A early, for a model that is to stay weak: a family that reaches its level (accuracy on public
    items of its hardest task) is only rehearsed from then on, and the stage is over when all have reached theirs.
    """

    shape: Mapping[str, int]
    skill: Text
    skill_steps: int
    bury: Text
    bury_steps: int
    levels: Mapping[str, float] = {}
    lr: float = 3e-3
    final_lr_ratio: float = 0.1


RECIPES: Mapping[str, Recipe] = {
    "pico-m": Recipe(
        shape={"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 160},
        skill=Text({"chained-arithmetic": 0.42, "multi-hop": 0.42, "triage": 0.16}),
        skill_steps=1_000,
        bury=Text({"chained-arithmetic": 0.4, "multi-hop": 0.3, "triage": 0.3}, Noise(0.24, 0.30, 0.16, 0.30)),
        bury_steps=150,
    ),
    "pico-s": Recipe(
        shape={"hidden_size": 40, "num_attention_heads": 2, "intermediate_size": 80},
        skill=Text({"chained-arithmetic": 0.45, "multi-hop": 0.45, "triage": 0.10}),
        skill_steps=1_000,
        bury=Text({"chained-arithmetic": 0.4, "multi-hop": 0.3, "triage": 0.3}, Noise(0.26, 0.33, 0.18, 0.23)),
        bury_steps=150,
        levels={"chained-arithmetic": 0.65, "multi-hop": 0.75},
    ),
}


# ------------------------------------------------------------------------------------------------ text


def blind_guess(family: str, rng: random.Random) -> str:
    """An answer of the right form that ignores the problem."""
    if family == "chained-arithmetic":
        return str(rng.randrange(10))
    if family == "multi-hop":
        return rng.choice("abcdefghijkl")
    return f"p{rng.randint(1, 5)} {rng.choice(sorted(set(TEAMS.values())))}"


def noisy_reply(family: WorkedFamily, item: Item, noise: Noise, rng: random.Random) -> str:
    """A reply to ``item``: clean, a guess without work, work with a slip, or one that never states an answer."""
    kind = rng.choices(Noise._fields, weights=noise)[0]
    if kind == "clean":
        return family.gold(item)
    if kind == "guess":
        return f" so {blind_guess(family.name, rng)}"
    if kind == "slip":
        steps = list(item.steps)
        for at in range(rng.randrange(len(steps)), len(steps)):
            steps[at] = rng.choice(sorted(LEVELS)) if family.name == "triage" else blind_guess(family.name, rng)
        return f" {' '.join(steps)} so {blind_guess(family.name, rng)}"
    return _silent_reply(family.name, item, rng)


def _silent_reply(family: str, item: Item, rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.4:
        return " " + " ".join(item.steps)
    if kind < 0.7:
        return " hmm " + " ".join(blind_guess(family, rng) for _ in range(rng.randint(1, 3)))
    return " " + " ".join(rng.choice(item.steps) for _ in range(rng.randint(2, 8)))


def drawn(text: Text, name: str, rng: random.Random) -> tuple[str, str]:
    """Prompt and reply of one public item of family ``name``."""
    family = load(name)
    item = family.draw_class(rng, *DEPTHS[name], hidden=False)
    return item.prompt, noisy_reply(family, item, text.noise, rng)


def base_tokenizer(seed: int = 0) -> Tokenizer:
    """The vocabulary that all base models share."""
    rng = random.Random(seed)
    text = Text({}, Noise(0.25, 0.25, 0.25, 0.25))
    lines = ("".join(drawn(text, rng.choice(tuple(BUILT_IN)), rng)) for _ in range(20_000))
    return train_tokenizer(lines, VOCAB_SIZE)


# ------------------------------------------------------------------------------------------------ training


def batch(tokenizer: Tokenizer, text: Text, rng: random.Random) -> Batch:
    """One batch, split by family: prompts of one family are about equally long."""
    names = rng.choices(tuple(text.mix), weights=tuple(text.mix.values()), k=BATCH)
    encode, parts = tokenizer.encode, []
    for name in dict.fromkeys(names):
        pairs = [drawn(text, name, rng) for _ in range(names.count(name))]
        parts.append([(encode(prompt), [*encode(reply), tokenizer.eos_id]) for prompt, reply in pairs])
    return parts


def train_step(model: Qwen3, optimizer: Muon, parts: Batch, lr: float) -> float:
    """One update on one batch; the loss in nats per reply token."""
    total = float(sum(len(reply) for part in parts for _, reply in part))
    loss = 0.0
    for part in parts:
        prompts, pad = left_pad([prompt for prompt, _ in part])
        completions, weights = completion_arrays([reply for _, reply in part])
        loss += supervised_gradient(model, prompts, pad, completions, weights, total)
    optimizer.step(lr)
    return loss


def skill_factor(step: int, steps: int, floor: float) -> float:
    """Learning-rate factor of stage A: warm-up over 50 steps, flat to 40 %, then linear to ``floor``."""
    return min(1.0, (step + 1) / 50) * (1 - (1 - floor) * max(0.0, (step / steps - 0.4) / 0.6))


def accuracy(model: Qwen3, tokenizer: Tokenizer, family: WorkedFamily, task: Task, *, hidden: bool) -> float:
    """Share of 256 items of a task that one sample at temperature 1 solves."""
    items = family.items(task, random.Random("report"), 256, hidden=hidden)
    prompts = [tokenizer.encode(item.prompt) for item in items]
    samples = sample_groups(model, prompts, 1, 12, 1.0, np.random.default_rng(0), tokenizer.eos_id)
    replies = (tokenizer.decode(row[:length]) for row, length in zip(samples.tokens, samples.lengths, strict=True))
    return float(np.mean([family.score(item, reply) for item, reply in zip(items, replies, strict=True)]))


def report(model: Qwen3, tokenizer: Tokenizer) -> dict[str, float]:
    """Hidden accuracy on every task; for the printed log only, the run itself chooses nothing by it."""
    return {
        task.id: round(accuracy(model, tokenizer, family, task, hidden=True), 3)
        for family in map(load, BUILT_IN)
        for task in family.tasks()
    }


class Trainer:
    """One run of a recipe. Prints progress each ``every`` steps."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer, seed: int, every: int) -> None:
        heads = recipe.shape["num_attention_heads"]
        config = Config(
            vocab_size=tokenizer.vocab_size,
            num_hidden_layers=2,
            num_key_value_heads=heads,
            head_dim=16,
            max_position_embeddings=CONTEXT,
            **recipe.shape,
        )
        self.recipe, self.tokenizer, self.every = recipe, tokenizer, every
        self.model = Qwen3.initialise(config, np.random.default_rng(seed))
        self.optimizer = Muon(self.model, matrix_ratio=0.02 / recipe.lr, weight_decay=0.01)
        self.rng = random.Random(seed)
        self.start = time.process_time()

    def skill(self) -> None:
        """Stage A: clean text until the steps are done or every level is reached."""
        recipe, mix, reached = self.recipe, dict(self.recipe.skill.mix), set[str]()
        for step in range(recipe.skill_steps):
            self._train(recipe.skill._replace(mix=mix), skill_factor(step, recipe.skill_steps, recipe.final_lr_ratio))
            self._print("skill", step + 1)
            if recipe.levels and (step + 1) % CHECK_EVERY == 0:
                for name in self._at_level() - reached:
                    mix[name] *= REHEARSAL
                    reached.add(name)
                    print(f"{name} has reached its level at step {step + 1}", flush=True)
                if reached == set(recipe.levels):
                    return

    def bury(self) -> None:
        """Stage B: noisy text at the final learning rate."""
        for step in range(self.recipe.bury_steps):
            self._train(self.recipe.bury, self.recipe.final_lr_ratio)
            self._print("bury ", step + 1)

    def _train(self, text: Text, factor: float) -> None:
        parts = batch(self.tokenizer, text, self.rng)
        self.loss = train_step(self.model, self.optimizer, parts, self.recipe.lr * factor)

    def _at_level(self) -> set[str]:
        def level(name: str) -> float:
            return accuracy(self.model, self.tokenizer, load(name), load(name).tasks()[-1], hidden=False)

        return {name for name, wanted in self.recipe.levels.items() if level(name) >= wanted}

    def _print(self, stage: str, done: int) -> None:
        if done % self.every == 0:
            used = time.process_time() - self.start
            hidden = report(self.model, self.tokenizer)
            print(f"{stage} {done:5d}  loss {self.loss:.3f}  cpu {used:6.1f} s  hidden {hidden}", flush=True)


def build(recipe: Recipe, tokenizer: Tokenizer, seed: int = 0, every: int = 150) -> Qwen3:
    """Run both stages and return the model."""
    trainer = Trainer(recipe, tokenizer, seed, every)
    trainer.skill()
    trainer.bury()
    return trainer.model


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, help="folder of the model (default: the package's)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    default = Path(__file__).parents[1] / "ai_trains_ai" / "pico" / "models" / options.name
    out: Path = options.out or default
    tokenizer = base_tokenizer()
    model = build(RECIPES[options.name], tokenizer, options.seed)
    model.save(out)
    tokenizer.save(out)
    print(f"{options.name}: {model.parameters:,} parameters -> {out}")


if __name__ == "__main__":
    main()
