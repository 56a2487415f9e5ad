"""Compiled files against prime-rl itself, where a checkout with its environment installed is at hand.

``AI_TRAINS_AI_PRIME_RL`` names a checkout with ``.venv/bin/rl`` and the profile's verifiers in it,
``AI_TRAINS_AI_PRIME_RL_VERSION`` the profile, if it is not the default. A dry run checks the engine's own rules and
writes the configs of its processes; it needs no GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from inner.prime_rl.jobs import SITE, config, job, plan_of

from ai_trains_ai.inner.prime_rl.compile import compile_job
from ai_trains_ai.inner.prime_rl.profiles import DEFAULT, Profile, profile
from ai_trains_ai.inner.prime_rl.shipment import modules

CHECKOUT = os.environ.get("AI_TRAINS_AI_PRIME_RL", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="AI_TRAINS_AI_PRIME_RL names no checkout of prime-rl"),
]

TABLE: dict[str, Any] = {
    "n": 5,
    "words": ["a", "None"],
    "levels": {"easy": 0.5, "hard": {"steps": 3}},
    "task": {"scale": 2.0, "modes": [{"name": "strict"}]},
}
"""An ``[environment]`` table whose types the launcher doesn't know."""

VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "adapter": {"lora__rank": 16, "optim__type": "sign_sgd"},
    "linear": {"scheduler__type": "linear", "scheduler__warmup_steps": 10, "scheduler__decay_steps": 30},
    "cosine": {"scheduler__type": "cosine", "scheduler__warmup_steps": 39, "algo__type": "max_rl"},
    "all else": {
        "loss__type": "ipo",
        "optim__type": "muon",
        "max_inflight_episodes": 8,
        "filter_zero_advantages": False,
        "renderer__enable_thinking": True,
        "algo__length_penalty__num_output_tokens_weight": 0.5,
    },
}


def dry_run(
    changes: dict[str, Any], tmp_path: Path, environment: Mapping[str, Any] | None = None
) -> tuple[Profile, Path]:
    """Compile, let the engine read it with our stub and harness, and return where its folder is."""
    chosen = profile(os.environ.get("AI_TRAINS_AI_PRIME_RL_VERSION", DEFAULT))
    values, site = config(**changes), evolve(SITE, folder=str(tmp_path / "out"))
    for name in ("ata_job.py", "ata_harness.py"):
        (tmp_path / name).write_bytes(modules()[f"modules/trusted/{name}"])
    (tmp_path / "rl.toml").write_text(compile_job(job(values, environment), chosen, plan_of(values), site))
    done = subprocess.run(
        [f"{CHECKOUT}/.venv/bin/rl", "@", str(tmp_path / "rl.toml"), "--dry-run"],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "PYTHONPATH": str(tmp_path),
            "CUDA_VISIBLE_DEVICES": "0,1",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return chosen, tmp_path / "out"


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_the_engine_accepts_it_and_writes_its_configs_where_the_layout_says(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    chosen, folder = dry_run(changes, tmp_path)
    assert [path for path in chosen.layout.configs.values() if not (folder / path).is_file()] == []


def test_the_environment_table_reaches_the_env_server_as_the_agent_wrote_it(tmp_path: Path) -> None:
    chosen, folder = dry_run({}, tmp_path, TABLE)
    written = (folder / chosen.layout.configs["env"]).read_text()
    config = tomllib.loads(written) if chosen.layout.configs["env"].endswith(".toml") else json.loads(written)
    assert config["env"]["taskset"] == {"id": SITE.taskset, **TABLE}
