from __future__ import annotations

from pathlib import Path

import pytest

import ai_trains_ai as ata
from ai_trains_ai.errors import ConfigurationError, PluginError, UnknownName
from ai_trains_ai.plugins import Registry, Spec
from ai_trains_ai.records import EpisodeOutcome, Reward
from ai_trains_ai.rewards.hybrid import HybridReward


class Flat(ata.RewardFn):
    def __init__(self, value: float = 0.5) -> None:
        self.value = value

    def __call__(self, outcome: EpisodeOutcome) -> Reward:
        return Reward(self.value, {}, {})


@pytest.mark.parametrize("what", ["hybrid", HybridReward, HybridReward(), "ai_trains_ai.rewards.hybrid:HybridReward"])
def test_what_a_user_may_pass(what: object) -> None:
    assert isinstance(Registry().resolve("reward", what), HybridReward)


def test_a_spec_carries_arguments_and_nests() -> None:
    runner = Registry().resolve("job_runner", ata.job_runner("embedded", provider=ata.gpu_provider("local", slots=3)))
    assert runner.provider.slots == 3
    assert Registry().resolve("reward", ata.reward("hybrid", hardened=False)).hardened is False


def test_an_unknown_name_gets_a_suggestion_and_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"Did you mean 'hybrid'\?.*hybrid-published"):
        Registry().resolve("reward", "hybrd")


def test_a_wrong_argument_shows_the_signature() -> None:
    with pytest.raises(ConfigurationError, match=r"'softened'.*hardened"):
        Registry().resolve("reward", ata.reward("hybrid", softened=True))


def test_something_of_another_interface_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no reward: it is an object"):
        Registry().resolve("reward", object())
    with pytest.raises(ConfigurationError, match="'local' is a GPU provider"):
        Registry().resolve("reward", ata.gpu_provider("local"))


def test_a_module_that_does_not_exist() -> None:
    with pytest.raises(ConfigurationError, match="no module 'no_such_module'"):
        Registry().resolve("reward", "no_such_module:Thing")


def test_a_missing_extra_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_a_package.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)

    class Plugin:
        @ata.hookimpl
        def register_rewards(self, register) -> None:  # type: ignore[no-untyped-def]
            register("judge", "needs_a_package:Judge", summary="", extra="judging")

    with pytest.raises(PluginError, match=r"'judge' of plugin Plugin can't be made.*No module named 'no_such_package'"):
        Registry([Plugin()]).resolve("reward", "judge")


def test_a_plugin_registers_names_and_clashes_are_named() -> None:
    class Plugin:
        def __init__(self, name: str) -> None:
            self.name = name

        @ata.hookimpl
        def register_rewards(self, register) -> None:  # type: ignore[no-untyped-def]
            register(self.name, Flat, summary="always the same")

    assert Registry([Plugin("flat")]).resolve("reward", Spec("reward", "flat", {"value": 0.1})).value == 0.1
    with pytest.raises(ConfigurationError, match="'hybrid' is registered by both 'builtin'"):
        Registry([Plugin("hybrid")]).resolve("reward", "hybrid")


def test_a_class_instead_of_an_instance() -> None:
    with pytest.raises(ConfigurationError, match=r"it is the class Flat, not an instance. Give an instance: Flat\(\)"):
        Registry([Flat])


def test_specs_in_lists_and_mappings_are_made() -> None:
    class Sum(ata.RewardFn):
        def __init__(self, parts: list[ata.RewardFn], named: dict[str, ata.RewardFn]) -> None:
            self.parts, self.named = parts, named

        def __call__(self, outcome: EpisodeOutcome) -> Reward:
            return Reward(0.0, {}, {})

    class Plugin:
        @ata.hookimpl
        def register_rewards(self, register) -> None:  # type: ignore[no-untyped-def]
            register("sum", Sum, summary="")

    hybrid = ata.reward("hybrid")
    made = Registry([Plugin()]).resolve("reward", ata.reward("sum", parts=[hybrid], named={"a": hybrid}))
    assert isinstance(made.parts[0], HybridReward)
    assert isinstance(made.named["a"], HybridReward)
