"""The Hugging Face layout, and the strict check of weights that come out of a sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from ai_trains_ai.errors import ConfigurationError, UntrustedDataError
from ai_trains_ai.pico.checkpoint import read_config
from ai_trains_ai.pico.config import Config
from ai_trains_ai.pico.model import Qwen3

KEY = "model.layers.1.self_attn.k_proj.weight"


def changed(model: Qwen3, **tensors: np.ndarray | None) -> bytes:
    """The model's bytes with one tensor replaced, added or (``None``) removed."""
    found = load(model.to_bytes()) | {name: value for name, value in tensors.items() if value is not None}
    return save({name: value for name, value in found.items() if tensors.get(name, value) is not None})


def test_weights_survive_bytes_and_folder(tiny: Qwen3, tmp_path: Path) -> None:
    np.testing.assert_array_equal(Qwen3.from_bytes(tiny.config, tiny.to_bytes()).flat, tiny.flat)
    tiny.save(tmp_path)
    again = Qwen3.load(tmp_path)
    np.testing.assert_array_equal(again.flat, tiny.flat)
    assert again.config == tiny.config
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}


def test_a_clone_is_independent(tiny: Qwen3) -> None:
    twin = tiny.clone()
    twin.flat += 1
    twin.grad += 1
    assert np.abs(twin.weights.embed - tiny.weights.embed).min() > 0.5
    assert (tiny.grad == 0).all()


def test_missing_tensor(tiny: Qwen3) -> None:
    with pytest.raises(UntrustedDataError, match=f"'{KEY}' is missing"):
        Qwen3.from_bytes(tiny.config, changed(tiny, **{KEY: None}))


def test_unknown_tensor(tiny: Qwen3) -> None:
    with pytest.raises(UntrustedDataError, match=r"unknown tensor 'lm_head\.weight'"):
        Qwen3.from_bytes(tiny.config, changed(tiny, **{"lm_head.weight": tiny.weights.embed}))


def test_wrong_shape(tiny: Qwen3) -> None:
    wrong = np.ascontiguousarray(load(tiny.to_bytes())[KEY][:-1])
    with pytest.raises(UntrustedDataError, match=f"'{KEY}' has shape"):
        Qwen3.from_bytes(tiny.config, changed(tiny, **{KEY: wrong}))


def test_transposed_embedding_of_the_same_size(tiny: Qwen3) -> None:
    name = "model.embed_tokens.weight"
    with pytest.raises(UntrustedDataError, match=f"'{name}' has shape"):
        Qwen3.from_bytes(tiny.config, changed(tiny, **{name: np.ascontiguousarray(tiny.weights.embed.T)}))


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32])
def test_wrong_type(tiny: Qwen3, dtype: type) -> None:
    wrong = load(tiny.to_bytes())[KEY].astype(dtype)
    with pytest.raises(UntrustedDataError, match=f"'{KEY}' is {np.dtype(dtype)}, expected float32"):
        Qwen3.from_bytes(tiny.config, changed(tiny, **{KEY: wrong}))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite(tiny: Qwen3, bad: float) -> None:
    wrong = load(tiny.to_bytes())[KEY].copy()
    wrong[1, 1] = bad
    with pytest.raises(UntrustedDataError, match=f"'{KEY}' holds a value that is not finite"):
        Qwen3.from_bytes(tiny.config, changed(tiny, **{KEY: wrong}))


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"PK\x03\x04 not safetensors at all", b"\xff" * 64])
def test_bytes_that_are_no_safetensors(tiny: Qwen3, data: bytes) -> None:
    with pytest.raises(UntrustedDataError):
        Qwen3.from_bytes(tiny.config, data)


def test_cut_off_bytes(tiny: Qwen3) -> None:
    with pytest.raises(UntrustedDataError, match="not a readable safetensors"):
        Qwen3.from_bytes(tiny.config, tiny.to_bytes()[:-10])


def test_a_type_that_numpy_does_not_know(tiny: Qwen3) -> None:
    data = tiny.to_bytes().replace(b'"dtype":"F32"', b'"dtype":"BF16"', 1)
    with pytest.raises(UntrustedDataError):
        Qwen3.from_bytes(tiny.config, data)


def test_config_round_trip_in_both_rope_spellings(tiny: Qwen3) -> None:
    values = tiny.config.to_json()
    assert Config.of(values) == tiny.config
    old = {k: v for k, v in values.items() if k != "rope_parameters"}
    assert Config.of(old | {"rope_theta": 5e5}).rope_theta == 5e5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "must be 'qwen3'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"head_dim": 5}, "even"),
        ({"hidden_size": 0}, "at least 1"),
    ],
)
def test_a_config_that_the_engine_does_not_compute(tiny: Qwen3, change: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Config.of(tiny.config.to_json() | change)


def test_a_folder_without_a_readable_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigurationError, match="JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(ConfigurationError, match="missing vocab_size"):
        read_config(tmp_path)
