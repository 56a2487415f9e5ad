"""A job becomes an rl.toml that prime-rl accepts, and nothing that an agent writes gets past the surface."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inner.prime_rl.jobs import SITE, SURFACE, at, config, corners, job, mended, plan_of, read
from jsonschema import Draft202012Validator

from ai_trains_ai.errors import ConfigurationError, UnknownName
from ai_trains_ai.inner.prime_rl.compile import RESERVED, compile_job
from ai_trains_ai.inner.prime_rl.profiles import DEFAULT, PROFILES, Locks, Profile, profile
from ai_trains_ai.records import ConfigKey

each_profile = pytest.mark.parametrize("version", PROFILES)


def compiled(values: Mapping[str, Any], version: str = DEFAULT, environment: Mapping[str, Any] | None = None) -> Any:
    return read(compile_job(job(values, environment), profile(version), plan_of(values), SITE))


@cache
def schema(version: str) -> Draft202012Validator:
    text = Path(__file__).with_name(f"schema-{version}.json").read_text("utf-8")
    return Draft202012Validator(json.loads(text))


def complaints(version: str, document: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}"[:300] for error in schema(version).iter_errors(document)]


def locks(values: Mapping[str, Any], version: str) -> Mapping[str, Any]:
    return profile(version).locked(SITE, Locks(plan_of(values), values["seq_len"], 7))


def wanted(values: Mapping[str, Any], version: str) -> dict[str, Any]:
    return {path: None if value == "None" else value for path, value in locks(values, version).items()}


def locked_in(document: Any, version: str) -> dict[str, Any]:
    return {path: at(document, path) for path in locks(config(), version)}


def value_of(key: ConfigKey) -> st.SearchStrategy[Any]:
    if key.type == "bool":
        return st.booleans()
    if key.choices:
        return st.sampled_from(key.choices)
    if key.type == "int":
        return st.integers(int(key.low or 0), int(key.high or 0))
    return st.floats(key.low, 1e3 if key.high is None else key.high, allow_nan=False)


configs = st.fixed_dictionaries({key.path: value_of(key) for key in SURFACE.keys}).map(mended)
names = st.sampled_from(("id", "task", "taskset", "env", "agent", "trainer", "output_dir", "n", "a.b", "env_vars"))
leaves = st.sampled_from((0, "x", {"id": "evil"}, {"taskset": {"id": "evil"}}, {"judges": []}, [{"id": "evil"}]))
tables = st.dictionaries(names, leaves, max_size=4)


# ----------------------------------------------------------------------------------------- what the engine reads


@each_profile
def test_every_corner_of_the_surface_is_valid_for_the_engine(version: str) -> None:
    assert {line for corner in corners() for line in complaints(version, compiled(corner, version))} == set()


@each_profile
@settings(max_examples=60, deadline=None)
@given(configs)
def test_any_config_of_the_surface_is_valid_for_the_engine(version: str, values: dict[str, Any]) -> None:
    assert complaints(version, compiled(values, version)) == []


@each_profile
def test_the_schema_refuses_a_name_that_the_engine_does_not_know(version: str) -> None:
    document = compiled(config(), version)
    document["orchestrator"]["max_async_level"] = 2
    assert "max_async_level" in "".join(complaints(version, document))


@each_profile
def test_an_agents_value_arrives_where_the_engine_looks_for_it(version: str) -> None:
    document = compiled(config(optim__lr=1e-5, lora__rank=8), version)
    assert (at(document, "trainer.optim.lr"), at(document, "trainer.model.lora.rank")) == (1e-5, 8)


def test_filtering_of_equal_rewards_is_a_list_in_one_version_and_a_switch_in_the_other() -> None:
    values = config(filter_zero_advantages=False)
    old = at(compiled(values, "v0.8.0"), "orchestrator.post_batch_filters[]")
    new = at(compiled(values, "0.8.1.dev67"), "orchestrator.train.filter_zero_advantages")
    assert (old["enforce"], new) == (False, False)


def test_a_constant_schedule_has_no_other_field() -> None:
    assert at(compiled(config()), "trainer.scheduler") == {"type": "constant"}


def test_without_a_rank_there_is_no_adapter() -> None:
    assert "lora" not in at(compiled(config()), "trainer.model")


def test_a_length_penalty_of_zero_is_none() -> None:
    assert at(compiled(config()), "orchestrator.algo") == {"type": "grpo"}


def test_the_environment_table_reaches_the_taskset() -> None:
    document = compiled(config(), environment={"rows": 100, "task": {"strict": True}})
    taskset = at(document, "orchestrator.train.source[].env.taskset")
    assert taskset == {"id": SITE.taskset, "rows": 100, "task": {"strict": True}}


# ---------------------------------------------------------------------------------------- what the harness locks


@each_profile
@settings(max_examples=50, deadline=None)
@given(configs)
def test_no_config_changes_a_locked_setting(version: str, values: dict[str, Any]) -> None:
    assert locked_in(compiled(values, version), version) == wanted(values, version)


@each_profile
@settings(max_examples=50, deadline=None)
@given(tables)
def test_no_environment_table_changes_anything_but_the_tasksets_own_config(
    version: str, environment: dict[str, Any]
) -> None:
    """Reserved names are refused, see below; whatever else it holds stays in its own table, under its own names."""
    own = {name: value for name, value in environment.items() if name not in ("id", "task")}
    document = compiled(config(), version, own)
    taskset = at(document, "orchestrator.train.source[].env.taskset")
    assert {name: taskset.pop(name) for name in own} == own
    assert document == compiled(config(), version)


@each_profile
def test_an_agents_keys_and_the_locked_ones_never_meet(version: str) -> None:
    places = [place.path for place in profile(version).places.values()]
    locked = list(locks(config(), version))
    every = [*places, *locked, *(f"orchestrator.train.source[].env.taskset.{name}" for name in RESERVED[1:])]
    assert len(set(every)) == len(every)
    assert not [(a, b) for a in every for b in every if b.startswith(f"{a}.")]


@each_profile
def test_a_profile_has_a_place_for_each_key_and_for_no_other(version: str) -> None:
    assert set(profile(version).places) == {key.path for key in SURFACE.keys}


@each_profile
@pytest.mark.parametrize(
    ("end", "value"),
    [
        ("weight_broadcast.type", "filesystem"),
        ("env_vars.HF_HUB_OFFLINE", "1"),
        ("orchestrator.renderer.name", "qwen3"),
        ("inference.router", None),
        ("output_dir", SITE.folder),
        ("model.name", SITE.model),
        ("inference.server.host", "127.0.0.1"),
        ("inference.server.port", SITE.inference_port),
        ("orchestrator.env_server_base_port", SITE.env_port),
        ("rollout_transport.port", SITE.rollout_port),
        ("orchestrator.train.source[].serve.pool.num_workers", 1),
        ("orchestrator.train.source[].env.agent.runtime.type", "subprocess"),
    ],
)
def test_the_harness_sets(version: str, end: str, value: object) -> None:
    assert at(compiled(config(), version), end) == value


def test_inference_is_told_what_the_memory_plan_says() -> None:
    values = config(seq_len=1024)
    document = compiled(values)
    assert at(document, "inference.gpu_memory_utilization") == plan_of(values).utilisation
    assert at(document, "inference.model.max_model_len") == 1024


# ----------------------------------------------------------------------------------------------- what is refused


def refusal(values: Mapping[str, Any], environment: Mapping[str, Any] | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        compile_job(job(values, environment), profile(), plan_of(config()), SITE)
    return str(caught.value)


def test_a_key_that_the_surface_lacks_is_refused_with_the_nearest() -> None:
    assert "Did you mean 'optim.lr'?" in refusal(config() | {"optim.learning": 1e-6})


def test_a_missing_key_is_refused() -> None:
    values = config()
    del values["max_steps"]
    assert "'max_steps' is missing" in refusal(values)


def test_a_table_in_the_place_of_a_number_is_refused() -> None:
    assert "not of type float" in refusal(config() | {"optim.lr": {"type": "sgd"}})


def test_a_config_that_breaks_a_rule_is_refused() -> None:
    assert "prompts times group_size" in refusal(config(batch_size=63))


def test_a_plan_for_full_training_is_refused_for_an_adapter() -> None:
    assert "mode 'full'" in refusal(config(lora__rank=8))


@pytest.mark.parametrize("path", RESERVED)
def test_fields_of_a_taskset_that_the_engine_acts_on_are_refused(path: str) -> None:
    outer, _, inner = path.partition(".")
    assert f"environment.{path} is the harness's" in refusal(config(), {outer: {inner: []} if inner else "x"})


# ------------------------------------------------------------------------------------------------------ versions


def test_an_unknown_version_names_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"v0\.8\.0"):
        profile("v0.9.0")


def files_of(known: Profile) -> list[str]:
    layout = known.layout
    by_name = (*layout.metrics.values(), *layout.configs.values(), *layout.logs.values())
    return [layout.weights, layout.broadcasts, *by_name]


@each_profile
def test_a_layout_stays_below_the_sites_folder(version: str) -> None:
    assert not [path for path in files_of(profile(version)) if path.startswith("/") or ".." in path]


@each_profile
def test_weights_are_found_by_their_step(version: str) -> None:
    assert profile(version).layout.weights.format(step=7).endswith("step_7")


def test_the_later_version_puts_everything_below_the_runs_name() -> None:
    later = profile("0.8.1.dev67")
    name = at(compiled(config(), later.version), "run.name")
    assert all(path.startswith(f"{name}/") for path in files_of(later))
