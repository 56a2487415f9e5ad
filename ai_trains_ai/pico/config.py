"""Shape of a Qwen3 model, read from and written to the Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ai_trains_ai.errors import ConfigurationError

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class Config:
    """What a Qwen3 decoder with tied embeddings needs to know. Field names are Hugging Face's."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    pad_token_id: int = 0
    eos_token_id: int = 1
    bos_token_id: int = 2

    def __post_init__(self) -> None:
        for name in _REQUIRED:
            if getattr(self, name) < 1:
                raise ConfigurationError(f"config: {name} must be at least 1, got {getattr(self, name)}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigurationError(
                f"config: num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})."
            )
        if self.head_dim % 2:
            raise ConfigurationError(f"config: head_dim must be even for rotary embeddings, got {self.head_dim}.")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Config:
        """Read a parsed ``config.json``.

        Raises:
            ConfigurationError: another architecture, a missing key, or a variant that this engine doesn't compute.
        """
        if values.get("model_type") != "qwen3":
            raise ConfigurationError(f"config: model_type must be 'qwen3', got {values.get('model_type')!r}.")
        missing = [name for name in _REQUIRED if name not in values]
        if missing:
            raise ConfigurationError(f"config: missing {', '.join(missing)}.")
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        unsupported = {
            "tie_word_embeddings": values.get("tie_word_embeddings", False) is not True,
            "attention_bias": bool(values.get("attention_bias", False)),
            "use_sliding_window": bool(values.get("use_sliding_window", False)),
            "hidden_act": values.get("hidden_act", "silu") != "silu",
            "rope type": rope.get("rope_type", "default") != "default",
        }
        wrong = [name for name, bad in unsupported.items() if bad]
        if wrong:
            raise ConfigurationError(f"config: the NumPy engine does not support this {', '.join(wrong)}.")
        optional = {name: values[name] for name in ("pad_token_id", "eos_token_id", "bos_token_id") if name in values}
        return cls(
            **{name: int(values[name]) for name in _REQUIRED},
            rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta", values.get("rope_theta", 10_000.0))),
            **{name: int(value) for name, value in optional.items() if value is not None},
        )

    def to_json(self) -> dict[str, Any]:
        """The content of ``config.json``, complete enough for ``transformers``."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **{name: getattr(self, name) for name in _REQUIRED},
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "use_cache": True,
            "initializer_range": 0.02,
            "dtype": "float32",
            "pad_token_id": self.pad_token_id,
            "eos_token_id": self.eos_token_id,
            "bos_token_id": self.bos_token_id,
        }
