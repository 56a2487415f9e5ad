"""Reading and writing of weights in the Hugging Face layout, with a strict check of what comes in.

Trained weights come out of a sandbox, so bytes are untrusted: only safetensors, and exactly the tensors that the
config names, each of the right shape, float32 and finite.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ai_trains_ai.errors import ConfigurationError, UntrustedDataError
from ai_trains_ai.pico.config import Config
from ai_trains_ai.pico.layers import Array
from ai_trains_ai.pico.model import Qwen3

WEIGHTS = "model.safetensors"


def tensors(model: Qwen3, *, gradients: bool = False) -> dict[str, Array]:
    """Views of all weights (or gradients) under Hugging Face's names; fused projections are split by rows."""
    source = model.grads if gradients else model.weights
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    width = model.config.intermediate_size
    named = {"model.embed_tokens.weight": source.embed, "model.norm.weight": source.norm}
    for layer, block in enumerate(source.blocks):
        named |= {
            f"model.layers.{layer}.{name}.weight": view
            for name, view in {
                "input_layernorm": block.input_norm,
                "self_attn.q_proj": block.qkv[:queries],
                "self_attn.k_proj": block.qkv[queries : queries + keys],
                "self_attn.v_proj": block.qkv[queries + keys :],
                "self_attn.q_norm": block.q_norm,
                "self_attn.k_norm": block.k_norm,
                "self_attn.o_proj": block.out,
                "post_attention_layernorm": block.post_norm,
                "mlp.gate_proj": block.gate_up[:width],
                "mlp.up_proj": block.gate_up[width:],
                "mlp.down_proj": block.down,
            }.items()
        }
    return named


def to_bytes(model: Qwen3) -> bytes:
    """See `Qwen3.to_bytes`."""
    from safetensors.numpy import save as serialise

    named = {name: np.ascontiguousarray(view) for name, view in tensors(model).items()}
    return serialise(named, metadata={"format": "pt"})


def from_bytes(config: Config, data: bytes) -> Qwen3:
    """See `Qwen3.from_bytes`."""
    from safetensors import SafetensorError
    from safetensors.numpy import load as parse

    try:
        found = parse(data)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UntrustedDataError(f"weights: not a readable safetensors file ({error}).") from error
    model = Qwen3(config)
    wanted = tensors(model)
    _check_names(wanted, found)
    for name, view in wanted.items():
        view[:] = _checked(name, found[name], view.shape)
    return model


def _check_names(wanted: Mapping[str, Array], found: Mapping[str, Any]) -> None:
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing:
        raise UntrustedDataError(f"weights: tensor {missing[0]!r} is missing ({len(missing)} in all).")
    if extra:
        raise UntrustedDataError(f"weights: unknown tensor {extra[0]!r} ({len(extra)} in all).")


def _checked(name: str, value: np.ndarray, shape: tuple[int, ...]) -> Array:
    if value.dtype != np.float32:
        raise UntrustedDataError(f"weights: tensor {name!r} is {value.dtype}, expected float32.")
    if value.shape != shape:
        raise UntrustedDataError(f"weights: tensor {name!r} has shape {value.shape}, expected {shape}.")
    if not np.isfinite(value).all():
        raise UntrustedDataError(f"weights: tensor {name!r} holds a value that is not finite.")
    return value


def read_config(folder: Path) -> Config:
    """The config of a Hugging Face folder.

    Raises:
        ConfigurationError: no readable ``config.json``, or a model that this engine doesn't compute.
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: can't read a model config ({error}).") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path}: expected a JSON object.")
    return Config.of(values)


def load(folder: Path) -> Qwen3:
    """See `Qwen3.load`."""
    config = read_config(folder)
    try:
        data = (folder / WEIGHTS).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{folder / WEIGHTS}: can't read the weights ({error}).") from error
    return from_bytes(config, data)


def save(model: Qwen3, folder: Path) -> None:
    """See `Qwen3.save`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    generation = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
    }
    _write_json(folder / "config.json", config.to_json())
    _write_json(folder / "generation_config.json", generation)
    (folder / WEIGHTS).write_bytes(to_bytes(model))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
