"""The NumPy engine against transformers: the same checkpoint, prompts and batch in one run, as a ratio.

python benchmarks/engine.py            # needs torch and transformers
"""

from __future__ import annotations

import os
import time

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

from collections.abc import Callable

import numpy as np

from ai_trains_ai.families.practice import practice
from ai_trains_ai.pico import model_folder
from ai_trains_ai.pico.decode import sample_groups
from ai_trains_ai.pico.grpo import PolicyBatch, policy_gradient
from ai_trains_ai.pico.model import Qwen3, left_pad
from ai_trains_ai.pico.tokenizer import Tokenizer

PROMPTS, GROUP, TOKENS, REPEATS = 8, 8, 10, 10


def seconds(work: Callable[[], object]) -> float:
    """Median CPU seconds of one call."""
    work()
    spent = []
    for _ in range(REPEATS):
        begin = time.process_time()
        work()
        spent.append(time.process_time() - begin)
    return float(np.median(spent))


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    folder = model_folder("pico-m")
    ours, tokenizer = Qwen3.load(folder), Tokenizer.load(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    prompts = [tokenizer.encode(str(row["prompt"])) for row in practice("chained-arithmetic", 3, 3, PROMPTS)]
    rng = np.random.default_rng(0)
    drawn = sample_groups(ours, prompts, GROUP, TOKENS, 1.0, rng, tokenizer.eos_id)
    ids, pad = left_pad(prompts)
    shape = (PROMPTS, GROUP, drawn.tokens.shape[1])
    advantages = rng.standard_normal((PROMPTS, GROUP)).astype(np.float32)
    batch = PolicyBatch(
        ids, pad, drawn.tokens.reshape(shape), drawn.mask.reshape(shape), drawn.logprobs.reshape(shape), advantages
    )
    rows = torch.tensor(np.repeat(ids, GROUP, 0))
    whole = torch.cat([rows, torch.tensor(drawn.tokens)], 1)
    attention = torch.tensor(np.repeat(np.arange(ids.shape[1])[None] >= pad[:, None], GROUP, 0)).long()
    seen = torch.cat([attention, torch.ones(drawn.tokens.shape, dtype=torch.long)], 1)
    old, mask = torch.tensor(drawn.logprobs), torch.tensor(drawn.mask).float()
    weight = torch.tensor(advantages.reshape(-1, 1))

    def sample_theirs() -> object:
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
        return theirs.generate(rows, attention_mask=attention, **options)

    def train_theirs() -> None:
        logits = theirs(whole, attention_mask=seen).logits[:, ids.shape[1] - 1 : -1].log_softmax(-1)
        logprobs = logits.gather(-1, torch.tensor(drawn.tokens)[..., None])[..., 0]
        ratio = (logprobs - old).exp()
        loss = -(torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight) * mask).sum() / mask.sum()
        loss.backward()
        theirs.zero_grad()

    sampling = seconds(sample_theirs) / seconds(
        lambda: sample_groups(ours, prompts, GROUP, TOKENS, 1.0, rng, tokenizer.eos_id)
    )
    training = seconds(train_theirs) / seconds(lambda: policy_gradient(ours, batch, normaliser=100.0))
    print(f"{PROMPTS} prompts x {GROUP} rollouts of {TOKENS} tokens, pico-m, one thread, CPU time:")
    print(f"sampling: transformers takes {sampling:.1f} times as long; gradient step: {training:.1f} times")


if __name__ == "__main__":
    main()
