"""What fits where: a model on GPUs of one type gives settings, or a refusal that shows the arithmetic.

The trainer keeps fp32 master weights, gradients and optimizer state on its GPU (prime-rl's optimizer off-loading moves
the state back for each step, so the peak stays), with activations recomputed by layer. vLLM takes a fixed share of its
GPU for weights, work space and KV cache. With one GPU both live on it: vLLM starts first, the trainer gets the rest.

The estimate is meant to be a little high: with sequences of 16,384 tokens on an A6000 it lies above the published
trainer peaks of prime-rl by less than a quarter (12.5 GiB for all of Qwen3-0.6B, 5.1 for an adapter on it, 23.3 for one
on Qwen3-4B). The share of vLLM is an estimate that nobody has measured here.
"""

from __future__ import annotations

from typing import Final, Literal

from attrs import field, frozen, validators

from ai_trains_ai.errors import ConfigurationError, UnknownName

GIB: Final = 1 << 30

STATE_BYTES: Final = {"adamw": 16, "muon": 16, "sgd": 12, "sign_sgd": 8}
"""Bytes a trained parameter: fp32 master and gradient (8), and the optimizer's moments."""

LM_HEAD_CHUNK: Final = 1024  # tokens whose logits exist at a time
CUDA_CONTEXT: Final = GIB // 2
FRAGMENTATION: Final = 1.08  # of all that the trainer allocates
VLLM_WORKSPACE: Final = 2 * GIB  # context, CUDA graphs, the profiling run's activations
MIN_SEQUENCES, MAX_SEQUENCES = 16, 128  # full-length sequences in the KV cache: fewer starve the trainer
MAX_UTILISATION: Final = 0.9
RESERVE: Final = 3 * GIB // 4  # of a GPU's memory, for nobody


@frozen
class Shape:
    """The sizes of a Qwen3 with tied embeddings: all that memory depends on."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocabulary: int = 151_936
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def parameters(self) -> int:
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads) + 2 * self.head_dim
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.vocabulary * self.hidden + self.layers * layer + self.hidden

    @property
    def kv_bytes(self) -> int:
        """Of one token, in bf16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    def adapter_parameters(self, rank: int) -> int:
        """Of a LoRA on all seven projections."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        ends = 2 * (self.hidden + query) + 2 * (self.hidden + key) + 3 * (self.hidden + self.intermediate)
        return self.layers * rank * ends


SHAPES: Final = {
    shape.name: shape
    for shape in (
        Shape("Qwen/Qwen3-0.6B", layers=28, hidden=1024, intermediate=3072, heads=16),
        Shape("Qwen/Qwen3-1.7B", layers=28, hidden=2048, intermediate=6144, heads=16),
        Shape("Qwen/Qwen3-4B", layers=36, hidden=2560, intermediate=9728, heads=32),
    )
}

GPU_MIB: Final = {
    "NVIDIA RTX A5000": 24_564,
    "NVIDIA GeForce RTX 3090": 24_576,
    "NVIDIA GeForce RTX 4090": 24_564,
    "NVIDIA L4": 23_034,
    "NVIDIA GeForce RTX 5090": 32_607,
    "NVIDIA A40": 46_068,
    "NVIDIA L40S": 46_068,
    "NVIDIA RTX A6000": 49_140,
    "NVIDIA RTX 6000 Ada Generation": 49_140,
    "NVIDIA A100 80GB PCIe": 81_920,
    "NVIDIA A100-SXM4-80GB": 81_920,
    "NVIDIA H100 80GB HBM3": 81_559,
    "NVIDIA H100 PCIe": 81_559,
    "NVIDIA H200": 143_771,
}
"""Total memory as the driver reports it, by the providers' name of the type."""


@frozen
class Machine:
    """GPUs of one type in one machine: one is shared by trainer and inference, of two each has its own."""

    gpu_type: str
    count: int = field(validator=validators.in_((1, 2)))

    @property
    def gpu_bytes(self) -> int:
        if self.gpu_type not in GPU_MIB:
            raise UnknownName.of("GPU type with a memory profile", self.gpu_type, GPU_MIB)
        return GPU_MIB[self.gpu_type] << 20

    def __str__(self) -> str:
        return f"{self.count} x {self.gpu_type}"


@frozen
class Part:
    """One summand of an estimate."""

    what: str
    bytes: float


@frozen
class Plan:
    """Settings with which a job fits. ``utilisation`` is the share of its GPU that vLLM takes."""

    mode: Literal["full", "adapter"]
    utilisation: float = field(validator=[validators.gt(0.0), validators.le(MAX_UTILISATION)])
    sequences: int = field(validator=validators.ge(1))
    lm_head_chunk: int = LM_HEAD_CHUNK
    arithmetic: str = field(default="", eq=False)


def shape(name: str) -> Shape:
    """The sizes of a base model by its hub name."""
    if name not in SHAPES:
        raise UnknownName.of("base model with a memory profile", name, SHAPES)
    return SHAPES[name]


def trainer_parts(model: Shape, optimizer: str, lora_rank: int, seq_len: int) -> tuple[Part, ...]:
    """What the trainer holds at its peak. Micro-batches are packed to ``seq_len`` tokens."""
    state: tuple[Part, ...]
    if lora_rank:
        adapter = model.adapter_parameters(lora_rank)
        state = (
            Part("frozen fp32 weights, 4 B each", 4 * model.parameters),
            Part(f"adapter of rank {lora_rank}, {STATE_BYTES[optimizer]} B each", STATE_BYTES[optimizer] * adapter),
        )
    else:
        each = STATE_BYTES[optimizer]
        state = (Part(f"weights, gradients and {optimizer} state, {each} B each", each * model.parameters),)
    # checkpointed inputs of all layers in bf16, and one layer's insides while it is recomputed
    token = 2 * model.layers * model.hidden + 34 * model.hidden + 8 * model.intermediate
    parts = (
        *state,
        Part(f"activations of {seq_len} tokens", seq_len * token),
        Part(f"logits of {LM_HEAD_CHUNK} tokens and their gradient", 8 * LM_HEAD_CHUNK * model.vocabulary),
        Part("CUDA context", CUDA_CONTEXT),
    )
    slack = (FRAGMENTATION - 1) * sum(part.bytes for part in parts)
    return (*parts, Part(f"fragmentation, {FRAGMENTATION - 1:.0%}", slack))


def inference_parts(model: Shape, seq_len: int, sequences: int) -> tuple[Part, ...]:
    """What vLLM takes with a KV cache for so many full-length sequences."""
    return (
        Part("bf16 weights", 2 * model.parameters),
        Part("fp32 output head", 4 * model.vocabulary * model.hidden),
        Part("vLLM work space", VLLM_WORKSPACE),
        Part(f"KV cache of {sequences} sequences of {seq_len} tokens", sequences * seq_len * model.kv_bytes),
    )


def plan(
    model: Shape, machine: Machine, *, seq_len: int, lora_rank: int = 0, optimizer: str = "adamw", in_flight: int = 64
) -> Plan:
    """Settings for a job, or `ConfigurationError` with the sum that does not fit.

    ``in_flight`` rollouts are sampled at a time: vLLM gets no more KV cache than they can fill.
    """
    trainer = trainer_parts(model, optimizer, lora_rank, seq_len)
    least = inference_parts(model, seq_len, MIN_SEQUENCES)
    room = machine.gpu_bytes - RESERVE
    arithmetic = "\n".join(
        [_sum("trainer", trainer), _sum("inference", least), f"each {machine.gpu_type} has {_gib(room)} to give"]
    )
    if why := shortfall(model, machine, seq_len, lora_rank, optimizer):
        fits = not lora_rank and not shortfall(model, machine, seq_len, 16, optimizer)
        remedy = "Set lora.rank: an adapter fits." if fits else "Use a smaller model, shorter seq_len or bigger GPU."
        raise ConfigurationError(f"{why}\n{arithmetic}\n{remedy}")
    sequences = max(MIN_SEQUENCES, min(in_flight, MAX_SEQUENCES))
    left = room - _total(trainer) if machine.count == 1 else room
    share = min(left, _total(inference_parts(model, seq_len, sequences))) / machine.gpu_bytes
    utilisation = min(MAX_UTILISATION, int(share * 1000) / 1000)
    return Plan("adapter" if lora_rank else "full", utilisation, sequences, arithmetic=arithmetic)


def shortfall(model: Shape, machine: Machine, seq_len: int, lora_rank: int = 0, optimizer: str = "adamw") -> str:
    """Why a job does not fit, in one line; "" when it does."""
    room = machine.gpu_bytes - RESERVE
    trainer = _total(trainer_parts(model, optimizer, lora_rank, seq_len))
    inference = _total(inference_parts(model, seq_len, MIN_SEQUENCES))
    if machine.count == 1:
        need, what = trainer + inference, "training and sampling"
    else:
        need, what = max((trainer, "training"), (inference, "sampling"))
    if need <= room and inference <= MAX_UTILISATION * machine.gpu_bytes:
        return ""
    kind = f"with an adapter of rank {lora_rank}" if lora_rank else "in full"
    return (
        f"{model.name} can't be trained {kind} with {optimizer} and seq_len {seq_len} on {machine}: "
        f"{what} on one GPU takes {_gib(need)}, it has {_gib(room)}."
    )


def _total(parts: tuple[Part, ...]) -> float:
    return sum(part.bytes for part in parts)


def _sum(name: str, parts: tuple[Part, ...]) -> str:
    summands = " + ".join(f"{_gib(part.bytes)} {part.what}" for part in parts)
    return f"{name}: {summands} = {_gib(_total(parts))}"


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"
