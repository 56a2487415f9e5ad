"""What a part's arguments become in config.toml, and back."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

import ai_trains_ai as ata
from ai_trains_ai.configuration import describe, revive
from ai_trains_ai.errors import ConfigurationError
from ai_trains_ai.records import EpisodeOutcome, Reward

ARGUMENTS: dict[str, Any] = {
    "nothing": None,
    "path": Path("runs/x"),
    "text": "ä \" ' \n",
    "number": 10**15,
    "real": float("inf"),
    "yes": True,
    "list": [1, None, [Path("a"), "b"]],
    "table": {"none": 1, "spec": {"path": None}},
    "part": ata.gpu_provider("local", slots=None),
}


def test_arguments_come_back_as_they_were() -> None:
    spec = ata.reward("thrift", **ARGUMENTS)
    written = tomllib.loads(tomli_w.dumps({"part": describe(spec)}))["part"]
    assert revive("reward", "reward", written) == spec


def test_a_numpy_scalar_is_its_number() -> None:
    assert describe(ata.reward("x", scale=np.float64(0.5), n=np.int64(3)))["arguments"] == {"scale": 0.5, "n": 3}


class Flat(ata.RewardFn):
    def __call__(self, outcome: EpisodeOutcome) -> Reward:
        return Reward(0.0, {}, {})


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (Flat, "test_configuration:Flat"),
        (Flat(), "test_configuration:Flat"),
        (ata.reward("judge", inner=Flat()), "judge with .*test_configuration:Flat"),
        (ata.reward("judge", inner=[{"deep": Flat}]), "judge with .*test_configuration:Flat"),
    ],
)
def test_what_a_file_can_not_hold_must_be_passed_again(part: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"started with .*{said} as 'reward'.*ata\.resume\(path, reward=…\)"):
        revive("reward", "reward", describe(part))


def test_a_text_that_no_file_takes() -> None:
    with pytest.raises(ConfigurationError, match="no valid text"):
        describe(ata.reward("x", text="\ud800"))
