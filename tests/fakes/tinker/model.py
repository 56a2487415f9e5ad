"""A tiny Qwen3 with a LoRA adapter: losses with real gradients, Adam, sampling, and the adapter's files.

The losses are sums over tokens, as the service documents them; arrays are aligned to the next token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from attrs import define, field

from ai_trains_ai.pico import checkpoint
from ai_trains_ai.pico.model import Qwen3

ALPHA = 16.0
Arrays = dict[str, np.ndarray]


class Refused(Exception):
    """What the service answers as a failed request of the user."""


@define(eq=False)
class Adapter:
    """W + (alpha / rank) B A on every linear layer of the base model."""

    base: Qwen3
    rank: int
    seed: int
    weights: Arrays = field(factory=dict)
    gradients: Arrays = field(factory=dict)
    first: Arrays = field(factory=dict)
    second: Arrays = field(factory=dict)
    steps: int = 0

    def __attrs_post_init__(self) -> None:
        if not self.weights:
            rng = np.random.default_rng(self.seed)
            for name, tensor in linear(self.base).items():
                out, width = tensor.shape
                self.weights[f"{name}.A"] = rng.standard_normal((self.rank, width)).astype(np.float32) / width**0.5
                self.weights[f"{name}.B"] = np.zeros((out, self.rank), np.float32)

    @property
    def scale(self) -> float:
        return ALPHA / self.rank

    def model(self) -> Qwen3:
        """The base model with the adapter merged into it."""
        merged = self.base.clone()
        for name, tensor in linear(merged).items():
            tensor += self.scale * self.weights[f"{name}.B"] @ self.weights[f"{name}.A"]
        return merged

    def accumulate(self, trained: Qwen3) -> None:
        """Add the gradients of the merged weights, projected on the two factors."""
        for name, gradient in linear(trained, gradients=True).items():
            a, b = self.weights[f"{name}.A"], self.weights[f"{name}.B"]
            for key, change in ((f"{name}.A", b.T @ gradient), (f"{name}.B", gradient @ a.T)):
                self.gradients[key] = self.gradients.get(key, 0.0) + self.scale * change

    def step(self, adam: Mapping[str, float]) -> float:
        """One step of AdamW; the norm of the gradient before it was clipped."""
        norm = float(sum((g.astype(np.float64) ** 2).sum() for g in self.gradients.values()) ** 0.5)
        limit = adam.get("grad_clip_norm") or 0.0
        clip = limit / norm if limit and norm > limit else 1.0
        self.steps += 1
        for key, gradient in self.gradients.items():
            gradient = gradient * clip
            m = self.first[key] = adam["beta1"] * self.first.get(key, 0.0) + (1 - adam["beta1"]) * gradient
            v = self.second[key] = adam["beta2"] * self.second.get(key, 0.0) + (1 - adam["beta2"]) * gradient**2
            update = (
                m / (1 - adam["beta1"] ** self.steps) / (np.sqrt(v / (1 - adam["beta2"] ** self.steps)) + adam["eps"])
            )
            decay = 1 - adam["learning_rate"] * adam.get("weight_decay", 0.0)
            self.weights[key] = (self.weights[key] * decay - adam["learning_rate"] * update).astype(np.float32)
        self.gradients = {}
        return norm

    # ------------------------------------------------------------------------------------------ files

    def save(self, path: Path, optimizer: bool) -> None:
        arrays = {f"w/{key}": value for key, value in self.weights.items()}
        if optimizer:
            arrays |= {f"m/{key}": value for key, value in self.first.items()}
            arrays |= {f"v/{key}": value for key, value in self.second.items()}
        with path.open("wb") as file:
            np.savez(file, rank=self.rank, steps=self.steps if optimizer else 0, **arrays)

    @classmethod
    def load(cls, base: Qwen3, path: Path, optimizer: bool = True) -> Adapter:
        with np.load(path) as file:
            parts: dict[str, Arrays] = {"w": {}, "m": {}, "v": {}}
            for key in file.files:
                if "/" in key:
                    parts[key[0]][key[2:]] = file[key]
            rank, steps = int(file["rank"]), int(file["steps"])
        if not optimizer:
            return cls(base, rank, 0, parts["w"])
        return cls(base, rank, 0, parts["w"], {}, parts["m"], parts["v"], steps)

    def export(self, folder: Path, model: str) -> None:
        """As PEFT writes an adapter."""
        from safetensors.numpy import save_file

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for key, value in self.weights.items():
            layer, factor = key.rsplit(".", 1)
            name = f"base_model.model.{layer.removesuffix('.weight')}.lora_{factor}.weight"
            tensors[name] = np.ascontiguousarray(value)
        save_file(tensors, str(folder / "adapter_model.safetensors"))
        targets = sorted({name.split(".")[-2] for name in linear(self.base)})
        config = {"peft_type": "LORA", "r": self.rank, "lora_alpha": ALPHA, "target_modules": targets}
        config |= {"base_model_name_or_path": model, "task_type": "CAUSAL_LM", "bias": "none", "lora_dropout": 0.0}
        (folder / "adapter_config.json").write_text(json.dumps(config))


def linear(model: Qwen3, gradients: bool = False) -> Arrays:
    """Views of the linear layers' weights by their Hugging Face name."""
    named = checkpoint.tensors(model, gradients=gradients)
    return {name: tensor for name, tensor in named.items() if name.endswith("_proj.weight")}


def loss_and_logprobs(
    model: Qwen3, inputs: np.ndarray, arrays: Arrays, loss: str, config: Mapping[str, float], backward: bool
) -> tuple[float, np.ndarray]:
    """Loss of one datum (a sum over tokens) and log-probabilities [n] of its targets; accumulates ``model.grad``."""
    targets = arrays["target_tokens"]
    if not np.array_equal(targets[:-1], inputs[1:]):
        raise Refused("target_tokens are not the next tokens of model_input")
    if len(inputs) != len(targets):
        raise Refused(f"target_tokens has length {len(targets)}, model_input {len(inputs)}")
    hidden, tape = model.forward(inputs[None, :1], np.zeros(1, np.int64), targets[None, None, :])
    logits, head = model.head(hidden[0, 0])
    logits = logits - logits.max(-1, keepdims=True)
    law = np.exp(logits)
    total = law.sum(-1, keepdims=True)
    law /= total
    rows = np.arange(len(targets))
    logprobs = (logits - np.log(total))[rows, targets]
    value, slope = _loss(loss, logprobs.astype(np.float64), arrays, config)
    if backward:
        onehot = np.zeros_like(law)
        onehot[rows, targets] = 1.0
        dlogits = (onehot - law) * slope[:, None].astype(np.float32)
        dhidden = model.head_backward(dlogits, head)
        model.backward(dhidden[None, None], tape)
    return value, logprobs.astype(np.float32)


def _loss(loss: str, logprobs: np.ndarray, arrays: Arrays, config: Mapping[str, float]) -> tuple[float, np.ndarray]:
    """The loss, and its derivative by each log-probability."""
    if loss == "cross_entropy":
        weights = arrays["weights"]
        return float(-(weights * logprobs).sum()), -weights
    advantages = arrays["advantages"]
    ratio = np.exp(logprobs - arrays["logprobs"])
    if loss == "importance_sampling":
        return float(-(ratio * advantages).sum()), -ratio * advantages
    if loss == "ppo":
        low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
        plain, clipped = ratio * advantages, np.clip(ratio, low, high) * advantages
        return float(-np.minimum(plain, clipped).sum()), np.where(plain <= clipped, -plain, 0.0)
    if loss == "cispo":
        low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 4.0)
        weight = np.clip(ratio, low, high) * advantages
        return float(-(weight * logprobs).sum()), -weight
    raise Refused(f"loss_fn {loss!r} is not supported")


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
