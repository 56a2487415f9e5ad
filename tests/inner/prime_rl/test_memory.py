"""What fits where, against what prime-rl published and what is known of the cards."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inner.prime_rl.jobs import A40, LARGER, RTX_4090, SMALL, TWO_A5000

from ai_trains_ai.errors import ConfigurationError, UnknownName
from ai_trains_ai.inner.prime_rl.memory import (
    GIB,
    GPU_MIB,
    SHAPES,
    STATE_BYTES,
    Machine,
    Plan,
    Shape,
    plan,
    shape,
    shortfall,
    trainer_parts,
)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("Qwen/Qwen3-0.6B", 596_049_920), ("Qwen/Qwen3-1.7B", 1_720_574_976), ("Qwen/Qwen3-4B", 4_022_468_096)],
)
def test_a_shape_counts_the_weights_of_its_checkpoint(name: str, parameters: int) -> None:
    assert shape(name).parameters == parameters


@pytest.mark.parametrize(
    ("name", "rank", "peak"), [("Qwen/Qwen3-0.6B", 0, 12.5), ("Qwen/Qwen3-0.6B", 16, 5.1), ("Qwen/Qwen3-4B", 16, 23.3)]
)
def test_the_trainers_estimate_lies_a_little_above_the_published_peak(name: str, rank: int, peak: float) -> None:
    estimate = sum(part.bytes for part in trainer_parts(shape(name), "adamw", rank, 16_384)) / GIB
    assert peak < estimate < 1.25 * peak


FITS = [
    (SMALL, A40, {}, True),
    (SMALL, RTX_4090, {}, True),
    (SMALL, TWO_A5000, {}, True),
    (LARGER, A40, {}, True),
    (LARGER, RTX_4090, {}, False),
    (LARGER, TWO_A5000, {}, False),
    (LARGER, A40, {"lora_rank": 16}, True),
    (LARGER, RTX_4090, {"lora_rank": 16}, True),
    (LARGER, TWO_A5000, {"lora_rank": 16}, True),
    (LARGER, RTX_4090, {"optimizer": "sign_sgd"}, False),
    (LARGER, TWO_A5000, {"optimizer": "sign_sgd"}, True),
]


@pytest.mark.parametrize(("model", "machine", "how", "fits"), FITS, ids=str)
def test_what_fits(model: Shape, machine: Machine, how: dict[str, object], fits: bool) -> None:
    assert (shortfall(model, machine, 2048, **how) == "") is fits  # type: ignore[arg-type]


cases = st.tuples(
    st.sampled_from(list(SHAPES.values())),
    st.builds(Machine, st.sampled_from(list(GPU_MIB)), st.sampled_from((1, 2))),
    st.integers(256, 4096),
    st.integers(0, 64),
    st.sampled_from(list(STATE_BYTES)),
)


@given(cases, st.integers(4, 512))
def test_a_plan_never_promises_more_than_the_gpu_has(
    case: tuple[Shape, Machine, int, int, str], in_flight: int
) -> None:
    model, machine, seq_len, rank, optimizer = case
    if shortfall(*case):
        return
    found = plan(model, machine, seq_len=seq_len, lora_rank=rank, optimizer=optimizer, in_flight=in_flight)
    trainer = sum(part.bytes for part in trainer_parts(model, optimizer, rank, seq_len))
    share = found.utilisation * machine.gpu_bytes
    assert (share + trainer if machine.count == 1 else max(share, trainer)) < machine.gpu_bytes


@given(cases)
def test_a_plan_is_refused_where_something_is_short_with_the_reason(case: tuple[Shape, Machine, int, int, str]) -> None:
    model, machine, seq_len, rank, optimizer = case
    if why := shortfall(*case):
        with pytest.raises(ConfigurationError, match=re.escape(why)):
            plan(model, machine, seq_len=seq_len, lora_rank=rank, optimizer=optimizer)


def refusal(model: Shape, machine: Machine, lora_rank: int = 0) -> str:
    with pytest.raises(ConfigurationError) as caught:
        plan(model, machine, seq_len=2048, lora_rank=lora_rank)
    return str(caught.value)


@pytest.mark.parametrize("line", ["trainer", "inference"])
def test_a_refusal_shows_a_sum_that_adds_up(line: str) -> None:
    (text,) = re.findall(rf"^{line}: (.*)$", refusal(LARGER, RTX_4090), re.MULTILINE)
    summands, total = text.split(" = ")
    numbers = [float(part.split(" GiB")[0]) for part in summands.split(" + ")]
    assert sum(numbers) == pytest.approx(float(total.split()[0]), abs=0.05 * (len(numbers) + 1))


def test_a_refusal_says_what_the_gpu_has() -> None:
    assert "each NVIDIA GeForce RTX 4090 has 23.2 GiB to give" in refusal(LARGER, RTX_4090)


def test_a_refusal_points_to_an_adapter_where_one_fits() -> None:
    assert "Set lora.rank" in refusal(LARGER, RTX_4090)


def test_a_refusal_points_elsewhere_where_none_fits() -> None:
    assert "smaller model" in refusal(SHAPES["Qwen/Qwen3-4B"], RTX_4090)


def test_few_rollouts_in_flight_leave_memory_to_the_trainer() -> None:
    few, many = (plan(SMALL, A40, seq_len=2048, in_flight=n) for n in (16, 128))
    assert few.utilisation < many.utilisation


def test_a_utilisation_above_one_is_no_plan() -> None:
    with pytest.raises(ValueError, match="utilisation"):
        Plan("full", 1.5, 64)


def test_an_unknown_gpu_type_is_named() -> None:
    with pytest.raises(UnknownName, match="NVIDIA RTX A5000"):
        plan(SMALL, Machine("NVIDIA RTX A5500", 1), seq_len=2048)


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(UnknownName, match=r"Qwen/Qwen3-0\.6B"):
        shape("Qwen/Qwen3-0.5B")
