"""Qwen3 with tied embeddings in NumPy float32: grouped forward and hand-written backward.

The maths is that of ``transformers.Qwen3ForCausalLM`` (tested for equal logits and gradients). Weights live in one flat
buffer and gradients in another, so that an optimizer is a handful of vector operations. Query, key and value
projections are fused, and so are gate and up.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ai_trains_ai.pico.attention import AttentionTape, Layout, attend, attend_backward
from ai_trains_ai.pico.config import Config
from ai_trains_ai.pico.layers import (
    Array,
    Ints,
    f4,
    rms_norm,
    rms_norm_backward,
    rotary_tables,
    rotate,
    rotate_backward,
    swiglu,
    swiglu_backward,
)


class Block(NamedTuple):
    """Views of one layer's weights (or gradients) in the flat buffer."""

    input_norm: Array  # [d]
    qkv: Array  # [(H+2K)*D, d]
    q_norm: Array  # [D]
    k_norm: Array  # [D]
    out: Array  # [d, H*D]
    post_norm: Array  # [d]
    gate_up: Array  # [2f, d]
    down: Array  # [d, f]


class Parameters(NamedTuple):
    """Views of a whole flat buffer."""

    embed: Array  # [V, d]
    norm: Array  # [d]
    blocks: tuple[Block, ...]


class _BlockTape(NamedTuple):
    project: tuple[Array, tuple[Array, Array], tuple[Array, Array]]
    attention: AttentionTape
    mixed: Array
    feed_forward: tuple[Array, tuple[Array, Array], tuple[Array, Array, Array], Array]


class Tape(NamedTuple):
    """What `Qwen3.backward` needs of one `Qwen3.forward`."""

    layout: Layout
    ids: Ints
    cos: Array
    sin: Array
    blocks: list[_BlockTape]


HeadTape = tuple[Array, tuple[Array, Array]]


class Qwen3:
    """A tiny Qwen3: weights ``flat`` [n] and gradients ``grad`` [n], both float32, with named views of each.

    Not thread-safe while it trains: `backward` accumulates into ``grad`` and an optimizer changes ``flat`` in place.
    """

    def __init__(self, config: Config) -> None:
        """All weights zero; see `initialise`, `load` and `from_bytes`."""
        self.config = config
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.eps = f4(config.rms_norm_eps)
        size = sum(math.prod(shape) for _, shape in parameter_shapes(config))
        self.flat: Array = np.zeros(size, f4)
        self.grad: Array = np.zeros(size, f4)
        self.weights = _views(config, self.flat)
        self.grads = _views(config, self.grad)
        self.cos, self.sin = rotary_tables(config.max_position_embeddings, config.head_dim, config.rope_theta)

    @classmethod
    def initialise(cls, config: Config, rng: np.random.Generator) -> Qwen3:
        """Random weights: normal, fan-in scaled, residual outputs shrunk by ``sqrt(2 layers)``; norms one."""
        model = cls(config)
        for name, shape, view in model.named_views(model.flat):
            if len(shape) == 1:
                view[:] = 1.0
                continue
            std = 0.02 if name == "embed" else 1.0 / math.sqrt(shape[1])
            if name.endswith((".out", ".down")):
                std /= math.sqrt(2 * config.num_hidden_layers)
            view[:] = rng.standard_normal(shape, f4) * f4(std)
        return model

    def clone(self) -> Qwen3:
        """An independent copy of the weights; gradients start at zero."""
        twin = Qwen3(self.config)
        twin.flat[:] = self.flat
        return twin

    @classmethod
    def load(cls, folder: Path | str) -> Qwen3:
        """Read ``config.json`` and ``model.safetensors`` of a Hugging Face folder. See `from_bytes` for errors."""
        from ai_trains_ai.pico import checkpoint

        return checkpoint.load(Path(folder))

    def save(self, folder: Path | str) -> None:
        """Write ``config.json``, ``generation_config.json`` and ``model.safetensors`` into ``folder``."""
        from ai_trains_ai.pico import checkpoint

        checkpoint.save(self, Path(folder))

    @classmethod
    def from_bytes(cls, config: Config, data: bytes) -> Qwen3:
        """Weights from safetensors bytes of unknown origin.

        Raises:
            UntrustedDataError: names the tensor that is missing, unknown, or of a wrong shape, type or value.
        """
        from ai_trains_ai.pico import checkpoint

        return checkpoint.from_bytes(config, data)

    def to_bytes(self) -> bytes:
        """Weights as safetensors bytes under Hugging Face's tensor names."""
        from ai_trains_ai.pico import checkpoint

        return checkpoint.to_bytes(self)

    @property
    def parameters(self) -> int:
        """Number of weights (tied embeddings count once)."""
        return self.flat.size

    def named_views(self, buffer: Array) -> list[tuple[str, tuple[int, ...], Array]]:
        """Name, shape and view of each tensor in a buffer of the size of ``flat``, in order."""
        views, start = [], 0
        for name, shape in parameter_shapes(self.config):
            stop = start + math.prod(shape)
            views.append((name, shape, buffer[start:stop].reshape(shape)))
            start = stop
        return views

    # ------------------------------------------------------------------ pieces, shared with the samplers

    def rotary(self, positions: Ints) -> tuple[Array, Array]:
        """Cosine and sine for every query and key head: [n, H+K, D] each."""
        both = self.heads + self.kv_heads
        return np.repeat(self.cos[positions][:, None], both, 1), np.repeat(self.sin[positions][:, None], both, 1)

    def project(
        self, block: Block, x: Array, cos: Array, sin: Array
    ) -> tuple[Array, Array, Array, tuple[Array, tuple[Array, Array], tuple[Array, Array]]]:
        """Scaled queries [n,H,D], keys [n,K,D] and values [n,K,D] of stream ``x`` [n,d], and the tape."""
        normed, norm_tape = rms_norm(x, block.input_norm, self.eps)
        qkv = (normed @ block.qkv.T).reshape(len(x), self.heads + 2 * self.kv_heads, self.head_dim)
        both = self.heads + self.kv_heads
        qk, qk_tape = rms_norm(qkv[:, :both], self._qk_scale(block), self.eps)
        qk = rotate(qk, cos, sin)
        return qk[:, : self.heads], qk[:, self.heads :], qkv[:, both:], (normed, norm_tape, qk_tape)

    def _qk_scale(self, block: Block) -> Array:
        """Norm weights of all query and key heads [H+K, D]; the softmax scale 1/sqrt(D) is folded into queries."""
        queries = block.q_norm * f4(1.0 / math.sqrt(self.head_dim))
        return np.concatenate([np.tile(queries, (self.heads, 1)), np.tile(block.k_norm, (self.kv_heads, 1))])

    def feed_forward(
        self, block: Block, x: Array
    ) -> tuple[Array, tuple[Array, tuple[Array, Array], tuple[Array, Array, Array], Array]]:
        """``x + mlp(norm(x))`` and the tape."""
        normed, norm_tape = rms_norm(x, block.post_norm, self.eps)
        inner, inner_tape = swiglu(normed @ block.gate_up.T)
        return x + inner @ block.down.T, (normed, norm_tape, inner_tape, inner)

    def head(self, hidden: Array) -> tuple[Array, HeadTape]:
        """Logits [n, V] of selected hidden states [n, d], and the tape for `head_backward`."""
        normed, tape = rms_norm(hidden, self.weights.norm, self.eps)
        return normed @ self.weights.embed.T, (normed, tape)

    def head_backward(self, dlogits: Array, tape: HeadTape) -> Array:
        """Accumulate the head's gradients; return that of the hidden states [n, d]."""
        normed, norm_tape = tape
        self.grads.embed[:] += dlogits.T @ normed
        dhidden, dnorm = rms_norm_backward(dlogits @ self.weights.embed, self.weights.norm, norm_tape)
        self.grads.norm[:] += dnorm
        return dhidden

    # ------------------------------------------------------------------ grouped forward and backward

    def forward(self, prompts: Ints, pad: Ints, completions: Ints) -> tuple[Array, Tape]:
        """Hidden states that predict each completion token.

        Args:
            prompts: Token ids [P, Lp], padded on the left with any id.
            pad: Number of padding tokens [P] of each prompt.
            completions: Token ids [P, G, L], padded on the right with any id.

        Returns:
            Hidden states [P, G, L, d] (feed selected rows to `head`) and the tape for `backward`.
        """
        count, prompt_length = prompts.shape
        _, group, length = completions.shape
        extra = length - 1  # the last token of a completion is predicted but never read
        repeats = self.heads // self.kv_heads
        layout = Layout.of(pad, prompt_length, group, extra, self.kv_heads, repeats, self.head_dim)
        ids = np.concatenate([prompts.ravel(), completions[:, :, :-1].ravel()])
        cos, sin = self.rotary(layout.positions)
        x = self.weights.embed[ids]
        tapes = []
        for block in self.weights.blocks:
            q, k, v, projected = self.project(block, x, cos, sin)
            mixed, attention = attend(q, k, v, layout)
            mixed = mixed.reshape(len(x), -1)
            x, fed = self.feed_forward(block, x + mixed @ block.out.T)
            tapes.append(_BlockTape(projected, attention, mixed, fed))
        at = layout.prompt_tokens
        hidden = np.empty((count, group, length, x.shape[1]), f4)
        hidden[:, :, 0] = x[:at].reshape(count, prompt_length, -1)[:, -1][:, None]
        hidden[:, :, 1:] = x[at:].reshape(count, group, extra, x.shape[1])
        return hidden, Tape(layout, ids, cos, sin, tapes)

    def backward(self, dhidden: Array, tape: Tape) -> None:
        """Accumulate into ``grad`` the gradient of a loss whose gradient by the hidden states is ``dhidden``."""
        layout = tape.layout
        at, width = layout.prompt_tokens, dhidden.shape[-1]
        dx = np.zeros((len(tape.ids), width), f4)
        dx[:at].reshape(layout.prompts, layout.prompt_length, width)[:, -1] = dhidden[:, :, 0].sum(1)
        dx[at:] = dhidden[:, :, 1:].reshape(-1, width)
        for block, grads, saved in zip(
            reversed(self.weights.blocks), reversed(self.grads.blocks), reversed(tape.blocks), strict=True
        ):
            dx = self._block_backward(block, grads, saved, dx, tape)
        # scatter-add as a matrix product: np.add.at is many times slower
        onehot = np.zeros((self.config.vocab_size, len(tape.ids)), f4)
        onehot[tape.ids, np.arange(len(tape.ids))] = 1.0
        self.grads.embed[:] += onehot @ dx

    def _block_backward(self, block: Block, grads: Block, saved: _BlockTape, dx: Array, tape: Tape) -> Array:
        normed, norm_tape, inner_tape, inner = saved.feed_forward
        grads.down[:] += dx.T @ inner
        dgate_up = swiglu_backward(dx @ block.down, inner_tape)
        grads.gate_up[:] += dgate_up.T @ normed
        dnormed, dweight = rms_norm_backward(dgate_up @ block.gate_up, block.post_norm, norm_tape)
        grads.post_norm[:] += dweight
        dx = dx + dnormed

        grads.out[:] += dx.T @ saved.mixed
        dqkv = np.empty((len(dx), self.heads + 2 * self.kv_heads, self.head_dim), f4)
        dmixed = (dx @ block.out).reshape(len(dx), self.heads, self.head_dim)
        attend_backward(dmixed, saved.attention, tape.layout, dqkv)
        return dx + self._project_backward(block, grads, saved, dqkv, tape)

    def _project_backward(self, block: Block, grads: Block, saved: _BlockTape, dqkv: Array, tape: Tape) -> Array:
        normed, norm_tape, qk_tape = saved.project
        both = self.heads + self.kv_heads
        dqk = rotate_backward(dqkv[:, :both], tape.cos, tape.sin)
        dqkv[:, :both], dscale = rms_norm_backward(dqk, self._qk_scale(block), qk_tape)
        grads.q_norm[:] += dscale[: self.heads].sum(0) * f4(1.0 / math.sqrt(self.head_dim))
        grads.k_norm[:] += dscale[self.heads :].sum(0)
        flat = dqkv.reshape(len(dqkv), -1)
        grads.qkv[:] += flat.T @ normed
        dnormed, dweight = rms_norm_backward(flat @ block.qkv, block.input_norm, norm_tape)
        grads.input_norm[:] += dweight
        return dnormed


def parameter_shapes(config: Config) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor, in the order of the flat buffer."""
    d, D = config.hidden_size, config.head_dim
    H, K, F = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    shapes: list[tuple[str, tuple[int, ...]]] = [("embed", (config.vocab_size, d)), ("norm", (d,))]
    block: dict[str, tuple[int, ...]] = {
        "input_norm": (d,),
        "qkv": ((H + 2 * K) * D, d),
        "q_norm": (D,),
        "k_norm": (D,),
        "out": (d, H * D),
        "post_norm": (d,),
        "gate_up": (2 * F, d),
        "down": (d, F),
    }
    for layer in range(config.num_hidden_layers):
        shapes += [(f"layers.{layer}.{name}", shape) for name, shape in block.items()]
    return shapes


def _views(config: Config, buffer: Array) -> Parameters:
    views, start = [], 0
    for _, shape in parameter_shapes(config):
        stop = start + math.prod(shape)
        views.append(buffer[start:stop].reshape(shape))
        start = stop
    width = len(Block._fields)
    blocks = tuple(Block(*views[at : at + width]) for at in range(2, len(views), width))
    return Parameters(views[0], views[1], blocks)


def left_pad(prompts: list[list[int]], pad_id: int = 0) -> tuple[Ints, Ints]:
    """Prompts as one array [P, Lp] padded on the left, and the number of padding tokens [P]."""
    length = max(map(len, prompts))
    ids = np.full((len(prompts), length), pad_id, np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = prompt
    return ids, np.array([length - len(prompt) for prompt in prompts], np.int64)
