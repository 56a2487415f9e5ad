"""The cached tokenizer is exactly the plain one."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ai_trains_ai.errors import ConfigurationError
from ai_trains_ai.families import BUILT_IN, load
from ai_trains_ai.pico import model_folder
from ai_trains_ai.pico.tokenizer import Tokenizer, train_tokenizer

TOKENIZER = Tokenizer.load(model_folder("pico-m"))
WORDS = [
    "start",
    "add",
    "p2",
    "data",
    "so",
    "83",
    "->",
    ">",
    "|",
    "8x9",
    "it's",
    "<eos>",
    "<pad",
    "",
    " ",
    "\n",
    "\t",
    "é",
]


def plain(text: str) -> list[int]:
    return TOKENIZER.plain.encode(text, add_special_tokens=False).ids


@given(st.text())
@example("a  b")
@example(" a ")
@example("a<eos>b <pad>")
@example("a\x1cb\x85c\u2003d")
def test_any_text_encodes_as_by_the_plain_tokenizer(text: str) -> None:
    assert TOKENIZER.encode(text) == plain(text)
    assert TOKENIZER.encode(text) == plain(text), "the cached way too"


@given(st.lists(st.sampled_from(WORDS), max_size=8), st.sampled_from([" ", "", "  "]))
def test_any_words_encode_as_by_the_plain_tokenizer(words: list[str], blank: str) -> None:
    text = blank.join(words)
    assert TOKENIZER.encode(text) == plain(text)


@given(st.text())
def test_decoding_gives_the_text_back(text: str) -> None:
    if not any(token in text for token in ("<pad>", "<eos>", "<s>")):
        assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=12))
def test_decoding_is_that_of_the_plain_tokenizer(ids: list[int]) -> None:
    assert TOKENIZER.decode(ids) == TOKENIZER.plain.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_words_of_the_families_are_about_one_token(name: str) -> None:
    family = load(name)
    for seed in range(50):
        item = family.draw(random.Random(seed), family.deepest)
        text = item.prompt + family.gold(item)
        two_digits = sum(len(word) == 2 and word.isdigit() for word in text.split())
        priorities = sum(word[0] == "p" and word[1:].isdigit() for word in text.split())
        start = len(TOKENIZER.encode(item.prompt.split()[0])) - 1
        assert len(TOKENIZER.encode(text)) == len(text.split()) + two_digits + priorities + start


def test_digits_are_split() -> None:
    assert [TOKENIZER.decode([i]) for i in TOKENIZER.encode("disk 83 ->")][-3:] == [" 8", "3", " ->"]


def test_all_models_share_one_vocabulary() -> None:
    first, second = (json.loads((model_folder(n) / "tokenizer.json").read_text()) for n in ("pico-s", "pico-m"))
    assert first == second


def test_save_and_load(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.encode("alert prod eu db") == TOKENIZER.encode("alert prod eu db")
    assert (again.pad_id, again.eos_id, again.vocab_size) == (0, 1, TOKENIZER.vocab_size)
    assert "chat_template" in json.loads((tmp_path / "tokenizer_config.json").read_text())


@pytest.mark.parametrize("text", ["a    b", " a  b c ", "a\n\n\n b", "a \t b", "a  "])
def test_white_space_that_the_vocabulary_merges(text: str) -> None:
    """In a vocabulary with tokens of several blanks, words don't encode one by one."""
    indented = train_tokenizer(["a    b   c  d\n\n\n\te"] * 50, 300)
    assert any(token.count("\u0120") > 1 for token in indented.plain.get_vocab())
    assert indented.encode(text) == indented.plain.encode(text, add_special_tokens=False).ids


def test_training_learns_words() -> None:
    fresh = train_tokenizer(["hello world 42"] * 50, 280)
    assert len(fresh.encode("hello world 42")) == 4


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
