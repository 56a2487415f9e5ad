"""Grouped causal attention: P left-padded prompts, G completions each; the prompt is run once per group.

All rows are one stream of tokens [P*Lp + P*G*N, heads, head_dim]: first the prompts, then the completions' inputs.
With grouped queries the H query heads are K key/value heads times R repeats. Shapes in comments use these letters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ai_trains_ai.pico.layers import MASKED, Array, Ints, f4, softmax_, softmax_backward


class AttentionTape(NamedTuple):
    """Operands of one attention that its backward needs."""

    queries: tuple[Array, Array]  # [P,K,R*Lp,D], [P,K,G*R*N,D]
    keys: tuple[Array, Array]  # [P,K,Lp,D], [P,K,G,N,D]
    values: tuple[Array, Array]
    prompt: Array  # probabilities [P,K,R*Lp,Lp]
    shared: Array  # of completions on the prompt [P,K,G*R*N,Lp]
    own: Array  # of completions on themselves [P,K,G,R*N,N]


@dataclass(frozen=True, slots=True)
class Layout:
    """Geometry of a grouped batch: who sits where in the stream and who may look at whom."""

    prompts: int
    group: int
    prompt_length: int
    extra: int
    kv_heads: int
    repeats: int
    head_dim: int
    positions: Ints
    prompt_mask: Array  # [P,1,1,Lp,Lp]
    key_mask: Array  # [P,1,1,Lp]
    causal: Array  # [N,N]

    @classmethod
    def of(cls, pad: Ints, prompt_length: int, group: int, extra: int, kv_heads: int, repeats: int, dim: int) -> Layout:
        """``pad`` [P] counts of padding on the left; ``extra`` inputs N per completion."""
        steps = np.arange(prompt_length)
        real = steps[None] >= pad[:, None]
        causal = steps[None, :, None] >= steps[None, None]
        after = (prompt_length - pad)[:, None] + np.arange(extra)[None]
        return cls(
            prompts=len(pad),
            group=group,
            prompt_length=prompt_length,
            extra=extra,
            kv_heads=kv_heads,
            repeats=repeats,
            head_dim=dim,
            positions=np.concatenate(
                [np.maximum(steps[None] - pad[:, None], 0).ravel(), np.repeat(after, group, 0).ravel()]
            ),
            prompt_mask=np.where(real[:, None, :] & causal, f4(0), MASKED)[:, None, None],
            key_mask=np.where(real, f4(0), MASKED)[:, None, None, :],
            causal=np.triu(np.full((extra, extra), MASKED, f4), 1),
        )

    @property
    def prompt_tokens(self) -> int:
        """Where in the stream the completions begin."""
        return self.prompts * self.prompt_length

    def split_queries(self, x: Array) -> tuple[Array, Array]:
        """[n, H, D] -> [P,K,R*Lp,D] and [P,K,G*R*N,D]."""
        P, G, L, N, K, R, D = self._sizes()
        prompt = x[: P * L].reshape(P, L, K, R, D).transpose(0, 2, 3, 1, 4).reshape(P, K, R * L, D)
        rest = x[P * L :].reshape(P, G, N, K, R, D).transpose(0, 3, 1, 4, 2, 5).reshape(P, K, G * R * N, D)
        return np.ascontiguousarray(prompt), np.ascontiguousarray(rest)

    def split_keys(self, x: Array) -> tuple[Array, Array]:
        """[n, K, D] -> [P,K,Lp,D] and [P,K,G,N,D]."""
        P, G, L, N, K, _, D = self._sizes()
        prompt = x[: P * L].reshape(P, L, K, D).transpose(0, 2, 1, 3)
        rest = x[P * L :].reshape(P, G, N, K, D).transpose(0, 3, 1, 2, 4)
        return np.ascontiguousarray(prompt), np.ascontiguousarray(rest)

    def merge_queries(self, prompt: Array, rest: Array, out: Array) -> None:
        """Inverse of `split_queries` into ``out`` [n, H, D]."""
        P, G, L, N, K, R, D = self._sizes()
        at = P * L
        out[:at] = prompt.reshape(P, K, R, L, D).transpose(0, 3, 1, 2, 4).reshape(at, K * R, D)
        out[at:] = rest.reshape(P, K, G, R, N, D).transpose(0, 2, 4, 1, 3, 5).reshape(P * G * N, K * R, D)

    def merge_keys(self, prompt: Array, rest: Array, out: Array) -> None:
        """Inverse of `split_keys` into ``out`` [n, K, D]."""
        P, G, L, N, K, _, D = self._sizes()
        out[: P * L] = prompt.transpose(0, 2, 1, 3).reshape(P * L, K, D)
        out[P * L :] = rest.transpose(0, 2, 3, 1, 4).reshape(P * G * N, K, D)

    def _sizes(self) -> tuple[int, int, int, int, int, int, int]:
        return (
            self.prompts,
            self.group,
            self.prompt_length,
            self.extra,
            self.kv_heads,
            self.repeats,
            self.head_dim,
        )


def _t(x: Array) -> Array:
    return x.swapaxes(-1, -2)


def attend(q: Array, k: Array, v: Array, layout: Layout) -> tuple[Array, AttentionTape]:
    """Attention of the whole stream. ``q`` [n,H,D] already scaled, ``k`` and ``v`` [n,K,D] -> [n,H,D]."""
    P, G, L, N, K, R, D = layout._sizes()
    (qp, qc), (kp, kc), (vp, vc) = layout.split_queries(q), layout.split_keys(k), layout.split_keys(v)
    prompt = (qp @ _t(kp)).reshape(P, K, R, L, L)
    prompt += layout.prompt_mask
    prompt = softmax_(prompt).reshape(P, K, R * L, L)
    scores = np.empty((P, K, G * R * N, L + N), f4)
    scores[..., :L] = qc @ _t(kp)
    scores[..., :L] += layout.key_mask
    own_scores = (qc.reshape(P, K, G, R * N, D) @ _t(kc)).reshape(P, K, G * R, N, N)
    own_scores += layout.causal
    scores[..., L:] = own_scores.reshape(P, K, G * R * N, N)
    softmax_(scores)
    shared = np.ascontiguousarray(scores[..., :L])
    own = np.ascontiguousarray(scores[..., L:]).reshape(P, K, G, R * N, N)
    rest = shared @ vp
    rest += (own @ vc).reshape(rest.shape)
    out = np.empty_like(q)
    layout.merge_queries(prompt @ vp, rest, out)
    return out, AttentionTape((qp, qc), (kp, kc), (vp, vc), prompt, shared, own)


def attend_backward(dout: Array, tape: AttentionTape, layout: Layout, out: Array) -> None:
    """Gradients of queries, keys and values, written into ``out`` [n, H+2K, D] in that order of heads."""
    P, G, _, N, K, R, D = layout._sizes()
    (qp, qc), (kp, kc), (vp, vc) = tape.queries, tape.keys, tape.values
    dop, doc = layout.split_queries(dout)
    doc_own, qc_own = doc.reshape(P, K, G, R * N, D), qc.reshape(P, K, G, R * N, D)

    dprompt = softmax_backward(tape.prompt, dop @ _t(vp))
    dshared, down = doc @ _t(vp), doc_own @ _t(vc)
    along = np.einsum("...i,...i->...", dshared, tape.shared)
    along += np.einsum("...i,...i->...", down, tape.own).reshape(along.shape)
    dshared -= along[..., None]
    dshared *= tape.shared
    down -= along.reshape(P, K, G, R * N, 1)
    down *= tape.own

    dqc = np.matmul(dshared, kp)
    dqc += (down @ kc).reshape(dqc.shape)
    dkp, dvp = _t(dprompt) @ qp, _t(tape.prompt) @ dop
    dkp += _t(dshared) @ qc
    dvp += _t(tape.shared) @ doc
    heads = K * R
    layout.merge_queries(dprompt @ kp, dqc, out[:, :heads])
    layout.merge_keys(dkp, _t(down) @ qc_own, out[:, heads : heads + K])
    layout.merge_keys(dvp, _t(tape.own) @ doc_own, out[:, heads + K :])
