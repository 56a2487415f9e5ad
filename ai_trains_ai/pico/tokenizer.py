"""Text to token ids and back, with a cache of words in front of `tokenizers`.

Byte-level BPE never merges across `` word`` pieces, so the ids of a plain line are those of its words one after the
other. Texts in which that could fail (white space other than single blanks, other scripts) take the slow way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers

from ai_trains_ai.errors import ConfigurationError

SPECIAL_TOKENS = ("<pad>", "<eos>", "<s>")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_CACHE_LIMIT = 50_000


class Tokenizer:
    """Exactly `tokenizers.Tokenizer.encode` and `decode`, quicker on short plain text.

    Attributes:
        pad_id: Id of ``<pad>``.
        eos_id: Id of ``<eos>``.
        vocab_size: Number of ids, special tokens included.
    """

    def __init__(self, plain: tokenizers.Tokenizer) -> None:
        self.plain = plain
        self.pad_id, self.eos_id = self._special("<pad>"), self._special("<eos>")
        self.vocab_size: int = plain.get_vocab_size()
        self._special_ids = frozenset(plain.get_added_tokens_decoder())
        self._words: dict[str, list[int]] = {}

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer:
        """Read ``tokenizer.json`` of a Hugging Face folder.

        Raises:
            ConfigurationError: no readable tokenizer there, or one without ``<pad>`` and ``<eos>``.
        """
        path = Path(folder) / "tokenizer.json"
        try:
            return cls(tokenizers.Tokenizer.from_str(path.read_text("utf-8")))
        except ConfigurationError:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            raise ConfigurationError(f"{path}: can't read a tokenizer ({error}).") from error

    def save(self, folder: Path | str) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` (with a chat template that joins the contents)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self.plain.to_str(pretty=False) + "\n", "utf-8")
        pad, eos, bos = SPECIAL_TOKENS
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": pad,
            "eos_token": eos,
            "bos_token": bos,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "padding_side": "left",
            "chat_template": CHAT_TEMPLATE,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; no special token is added."""
        if not _is_plain(text):
            return list(self.plain.encode(text, add_special_tokens=False).ids)
        ids: list[int] = []
        for number, word in enumerate(text.split(" ")):
            ids += self._word(" " + word if number else word)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; special tokens are left out."""
        return str(self.plain.decode([int(i) for i in ids if int(i) not in self._special_ids]))

    def _word(self, piece: str) -> list[int]:
        known = self._words.get(piece)
        if known is None:
            known = list(self.plain.encode(piece, add_special_tokens=False).ids)
            if len(self._words) < _CACHE_LIMIT:
                self._words[piece] = known
        return known

    def _special(self, token: str) -> int:
        found = self.plain.token_to_id(token)
        if found is None:
            raise ConfigurationError(f"The tokenizer has no {token} token.")
        return int(found)


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and "  " not in text and not text.endswith(" ")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE from scratch: each digit (with the blank before it) is a piece, words become about one token."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

    plain = tokenizers.Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(" ?[0-9]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    plain.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    plain.train_from_iterator(texts, trainer)
    return Tokenizer(plain)
