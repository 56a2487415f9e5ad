"""The shipped models: baselines inside their bands, a good job lifts them, bad jobs don't.

Bands are wide enough for another BLAS; samples are at temperature 1 on hidden-class items.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ai_trains_ai.errors import UnknownName
from ai_trains_ai.families import BUILT_IN, load
from ai_trains_ai.pico import model_folder, model_names

if TYPE_CHECKING:
    from conftest import Shipped

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
every_task = pytest.mark.parametrize("task_id", [task.id for name in BUILT_IN for task in load(name).tasks()])


def test_shipped_names_and_files() -> None:
    assert {"pico-m", "pico-s"} <= set(model_names())
    for name in ("pico-s", "pico-m"):
        assert {path.name for path in model_folder(name).iterdir()} == FILES


def test_unknown_model_suggests_one() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'pico-m'"):
        model_folder("pico_m")


def test_sizes(pico_s: Shipped, pico_m: Shipped) -> None:
    assert pico_s.model.parameters < 0.6 * pico_m.model.parameters
    assert pico_m.model.parameters < 120_000


@every_task
def test_untrained_models_are_weak_but_give_a_signal(pico_s: Shipped, pico_m: Shipped, task_id: str) -> None:
    for shipped in (pico_s, pico_m):
        assert 0.05 < shipped.accuracy(task_id) < 0.25


@every_task
def test_a_good_job_lifts_pico_m(pico_m: Shipped, task_id: str) -> None:
    trained = pico_m.grpo(task_id)
    assert pico_m.accuracy(task_id, trained) > 0.75


@pytest.mark.parametrize("task_id", ["chained-arithmetic-3-4", "multi-hop-2-4"])
def test_the_same_job_lifts_pico_s_less(pico_s: Shipped, task_id: str) -> None:
    trained = pico_s.grpo(task_id)
    assert pico_s.accuracy(task_id) + 0.05 < pico_s.accuracy(task_id, trained) < 0.8


BAD = {
    "tiny learning rate": {"lr": 1e-5},
    "greedy sampling": {"temperature": 0.0},
    "constant reward": {"reward": lambda family, item, reply: 1.0},
    "format only": {"reward": lambda family, item, reply: float(" so " in reply)},
    "longer is better": {"reward": lambda family, item, reply: min(1.0, len(reply.split()) / 10)},
}


@pytest.mark.parametrize("setting", BAD)
def test_a_bad_setting_does_not(pico_m: Shipped, setting: str) -> None:
    task_id = "chained-arithmetic-3-4"
    trained = pico_m.grpo(task_id, **BAD[setting])
    assert pico_m.accuracy(task_id, trained) < 0.25


def test_a_job_is_deterministic_for_its_seed(pico_s: Shipped) -> None:
    first, second, other = (pico_s.grpo("triage", steps=3, seed=seed).flat for seed in (0, 0, 1))
    assert (first == second).all()
    assert (first != other).any()
