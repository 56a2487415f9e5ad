"""How the tiny outer model was made: supervised learning on the transcripts of an unreliable scripted author.

    python recipes/outer_model.py [--out DIR] [--transcripts 1500] [--steps 700] [--seed 0]

Transcripts are real episodes: the author of `job_grammar` works in a real workspace and the real validator answers it.
The model imitates the author, so it starts as unreliable as he is. What the outer RL later finds lies within what this
text shows; the recipe and the weights are frozen by hash before any run that is reported (``provenance.json``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import numpy as np
from job_grammar import Author
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from ai_trains_ai.agent import Rollout, open_workspace, opening, play
from ai_trains_ai.experiment import Experiment
from ai_trains_ai.families.hidden import reserved
from ai_trains_ai.inner.embedded import EmbeddedJobRunner
from ai_trains_ai.outer.chat import END, render
from ai_trains_ai.pico.config import Config
from ai_trains_ai.pico.model import Qwen3, left_pad
from ai_trains_ai.pico.optim import Muon, schedule
from ai_trains_ai.pico.supervised import supervised_gradient
from ai_trains_ai.records import Baseline, Evaluation, SamplingParams, Task
from ai_trains_ai.sandbox import BubblewrapSandbox
from ai_trains_ai.validation import Validator

SPECIAL = ["<pad>", END, "<|im_start|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
# lines are pieces of their own, and so are digits: a line is a few tokens, a value is written digit by digit
PIECES = r"(?:(?!\\n)[^\d\n])*(?:\\n)+|\n|\d|(?:(?!\\n)[^\d\n])+"
COMMON = 0.01  # a piece is a token when it occurs once in a hundred transcripts
CONTEXT = 1_024
PART = 6
CONTEXT_WEIGHT = 0.02  # of tokens that the author did not write

Row = tuple[list[int], list[int], list[float]]  # prompt, completion, weight of each completion token


def scores(rng: random.Random, task: Task, names: Sequence[str]) -> list[Baseline] | None:
    """Made-up baselines, shown in half of the transcripts: the model must read both kinds of brief."""
    if rng.random() < 0.5:
        return None
    return [Baseline(n, Evaluation(task.id, n, 512, rng.uniform(0.05, 0.25), 0.02)) for n in names]


async def transcripts(count: int, seed: int) -> list[Rollout]:
    """Play ``count`` episodes of the author against the real tools and validator."""
    runner = EmbeddedJobRunner()
    families = Experiment.embedded().registry
    found = [families.resolve("task_family", name) for name in ("chained-arithmetic", "multi-hop", "triage")]
    tasks = [(family, task) for family in found for task in family.tasks()]
    surface, base_models = runner.config_surface(), runner.base_models()
    sandbox = BubblewrapSandbox(preload=("ai_trains_ai.environments.warm:warm_up",))
    await sandbox.start()
    validator = Validator(sandbox, surface, base_models, reserved=reserved)
    gate = asyncio.Semaphore(3)

    async def one(index: int) -> Rollout:
        rng = random.Random(f"transcript {seed} {index}")
        family, task = rng.choice(tasks)
        shown = scores(rng, task, [model.name for model in base_models])
        async with gate:
            return await play(
                f"t{index}",
                opening(task, base_models, shown),
                open_workspace(task, base_models, shown, surface),
                Author(rng, task),
                lambda submission: validator.validate(submission, task, family),
                sandbox,
                SamplingParams(),
            )

    try:
        return await asyncio.gather(*(one(index) for index in range(count)))
    finally:
        await sandbox.close()


def make_tokenizer(played: Sequence[Rollout]) -> Tokenizer:
    """Whole lines as tokens: every piece that occurs often, and single bytes for the rest."""
    pieces = pre_tokenizers.Split(Regex(PIECES), "isolated")
    splitter = pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(False, use_regex=False)])
    special = re.compile("|".join(map(re.escape, SPECIAL)))
    parts = (part for rollout in played for part in special.split(text(rollout)) if part)
    counts = Counter(piece for part in parts for piece, _ in splitter.pre_tokenize_str(part))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    frequent = sorted(piece for piece, n in counts.items() if n >= COMMON * len(played) and len(piece) > 1)
    # Unigram takes the best-scored split: one common piece beats any spelling in bytes
    vocabulary = [(piece, 0.0) for piece in SPECIAL] + [(piece, -1.0) for piece in frequent]
    vocabulary += [(byte, -10.0) for byte in alphabet]
    plain = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    plain.pre_tokenizer = splitter
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(SPECIAL)
    return plain


def text(rollout: Rollout) -> str:
    """A transcript as the tokenizer sees it."""

    class Plain:
        def encode(self, text: str) -> list[str]:
            return [text]

    return "".join(render(rollout.messages, Plain()))  # type: ignore[arg-type]


def row(rollout: Rollout, tokenizer: Tokenizer) -> Row:
    """One training example: the loss is on what the author wrote."""

    class Ids:
        def encode(self, text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)

    first = next(i for i, message in enumerate(rollout.messages) if message.role == "assistant")
    prompt = render(rollout.messages[:first], Ids())
    completion: list[int] = []
    weights: list[float] = []
    for index in range(first, len(rollout.messages)):
        message = rollout.messages[index]
        if message.role == "assistant":
            written = Ids().encode(message.content + END)
            completion += written
            weights += [1.0] * len(written)
            completion += Ids().encode("\n")
            weights += [CONTEXT_WEIGHT]
        else:
            answered = Ids().encode(
                f"<|im_start|>user\n<tool_response>\n{message.content}\n</tool_response>{END}\n"
            ) + Ids().encode("<|im_start|>assistant\n")
            completion += answered
            weights += [CONTEXT_WEIGHT] * len(answered)
    return prompt, completion, weights


def pretrain(rows: Sequence[Row], vocab_size: int, steps: int, seed: int, batch: int = 24) -> Qwen3:
    """The model after ``steps`` steps of Muon on the transcripts."""
    config = Config(
        vocab_size=vocab_size,
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=24,
        intermediate_size=240,
        max_position_embeddings=CONTEXT,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    rng = np.random.default_rng(seed)
    model = Qwen3.initialise(config, rng)
    optimizer = Muon(model, matrix_ratio=5.0, weight_decay=0.01)
    begin = time.process_time()
    for step in range(steps):
        chosen = sorted((rows[i] for i in rng.integers(len(rows), size=batch)), key=lambda row: len(row[1]))
        total = sum(sum(weights) for _, _, weights in chosen)
        # rows of about equal length share a part, so that little of it is padding
        parts = [chosen[i : i + PART] for i in range(0, batch, PART)]
        loss = sum(supervised_gradient(model, *arrays(part), total) for part in parts)
        optimizer.step(
            4e-3 * schedule("linear", step, steps, warmup_steps=20, decay_steps=int(0.6 * steps), min_lr_ratio=0.05)
        )
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss:.4f}, {time.process_time() - begin:.0f} CPU s", flush=True)
    return model


def arrays(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    prompts, pad = left_pad([prompt for prompt, _, _ in rows])
    length = max(len(completion) for _, completion, _ in rows)
    ids, weights = np.zeros((len(rows), 1, length), np.int64), np.zeros((len(rows), 1, length), np.float32)
    for index, (_, completion, weight) in enumerate(rows):
        ids[index, 0, : len(completion)], weights[index, 0, : len(weight)] = completion, weight
    return prompts, pad, ids, weights


def describe(played: Sequence[Rollout]) -> None:
    first = sum(bool(r.reports) and r.reports[0].valid for r in played) / len(played)
    valid = sum(r.submission is not None for r in played) / len(played)
    print(f"author: valid at once {first:.2f}, in the end {valid:.2f}, ends {Counter(r.end for r in played)}")
    print("findings", Counter(f.code for r in played for report in r.reports for f in report.errors).most_common(30))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("ai_trains_ai/pico/models/outer"))
    parser.add_argument("--transcripts", type=int, default=1_500)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begin = time.monotonic()
    played = asyncio.run(transcripts(arguments.transcripts, arguments.seed))
    print(f"{len(played)} transcripts in {time.monotonic() - begin:.0f} s")
    describe(played)
    tokenizer = make_tokenizer(played)
    rows = [row(rollout, tokenizer) for rollout in played]
    lengths = [(len(prompt), len(completion)) for prompt, completion, _ in rows]
    print(f"vocabulary {tokenizer.get_vocab_size()}, tokens of prompt and completion:")
    print(f"mean {np.mean(lengths, 0)}, longest {np.max(lengths, 0)}")
    rows = [r for r in rows if len(r[0]) + len(r[1]) <= CONTEXT]
    model = pretrain(rows, tokenizer.get_vocab_size(), arguments.steps, arguments.seed)
    model.save(arguments.out)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": END,
        "bos_token": "<|im_start|>",
    }
    (arguments.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
