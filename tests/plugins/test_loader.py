"""Installed plugins: good ones load whatever the others do, and each fault is reported with its remedy."""

from __future__ import annotations

import logging

import pytest

import ai_trains_ai as ata
from ai_trains_ai.errors import MissingDependency, PluginError, UnknownName
from ai_trains_ai.plugins import Registry
from ai_trains_ai.plugins.manager import PluginRecord

from .conftest import HEAD, Install, rewarding

IMPORT = HEAD + "@hookimpl\n"
BROKEN = {
    "import": ("import no_thing\n", "raised ModuleNotFoundError: No module named 'no_thing'", "Install no_thing"),
    "raise": ("1 / 0\n", "raised ZeroDivisionError", "Repair or update ata-bad"),
    "exit": ("raise SystemExit(3)\n", "raised SystemExit: 3", "DISABLE_PLUGINS=ata-bad"),
    "unknown": (IMPORT + "def register_reward(register): ...", "hook 'register_reward'", "mean 'register_rewards'?"),
    "default": (IMPORT + "def on_event(event=None): ...", "'event' of its on_event has a default", "Remove the"),
    "argument": (IMPORT + "def register_rewards(registre): ...", "an argument 'registre'", "mean 'register'?"),
    "keywords": (IMPORT + "def on_event(**events): ...", "takes *events", "on_event may take: event"),
    "keyword only": (IMPORT + "def on_event(*, event): ...", "is keyword-only", "ordinary"),
    "async": (IMPORT + "async def on_event(event): ...", "its on_event is asynchronous", "plain function"),
    "generator": (IMPORT + "def on_event(event): yield", "which would never run", "without yield"),
    "wrapper": (HEAD + "@hookimpl(wrapper=True)\ndef on_event(event): return (yield)\n", "a wrapper", "hook itself"),
    "unmarked": ("def on_event(event): ...\n", "its on_event is not marked", "@ai_trains_ai.hookimpl"),
    "nothing": ("x = 1\n", "this module implements no hook", "register_rewards"),
}


def record(registry: Registry, name: str) -> PluginRecord:
    return registry.plugins.find(name)


@pytest.mark.parametrize(("source", "reason", "remedy"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_among_good_ones(
    install: Install, source: str, reason: str, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    install("ata-able", rewarding("able"))
    install("ata-bad", source, version="0.3")
    install("ata-zeal", rewarding("zeal"))
    registry = Registry()
    assert registry.resolve("reward", "able") is not None
    assert registry.resolve("reward", "zeal") is not None
    bad = record(registry, "ata-bad")
    assert (bad.status, bad.distribution, bad.version) == ("failed", "ata-bad", "0.3")
    assert reason in bad.faults[0].reason
    assert remedy in bad.faults[0].remedy
    (warning,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert warning.startswith("Plugin ata-bad (ata-bad 0.3) is left out: ")
    with pytest.raises(PluginError, match="strict=True allows none:\n  ata-bad"):
        Registry(strict=True)
    with pytest.raises(PluginError, match=r"ata-bad \(ata-bad 0\.3\) is required, but failed: "):
        Registry(required=["ata-bad"])
    with pytest.raises(UnknownName, match=r"Not loaded: ata-bad .*plugins --why ata-bad"):
        registry.resolve("reward", "bad")


def test_a_class_and_an_attribute_that_is_not_there(install: Install) -> None:
    install("ata-class", HEAD + "class P:\n  @hookimpl\n  def on_event(self, event): ...\n", attribute="P")
    install("ata-gone", "x = 1\n", attribute="plugin")
    registry = Registry()
    assert "it is the class P, not an instance. Give an instance: P()" in str(record(registry, "ata-class").faults[0])
    assert "has no attribute 'plugin'" in record(registry, "ata-gone").faults[0].reason


PARTS = {
    "async factory": ("async def make(): ...", "make", "asynchronous factory"),
    "no interface": ("class Thing: ...", "Thing", "Thing, which is no RewardFn"),
    "abstract": ("class Thing(RewardFn): ...", "Thing", "Thing, which lacks __call__"),
    "no factory": ("", "7", "with 7, which can't be called"),
    "import string": ("", "'some.module'", "import string 'some.module'"),
}


@pytest.mark.parametrize(("source", "factory", "reason"), PARTS.values(), ids=PARTS)
def test_a_part_that_can_not_be_one_is_left_out_and_its_plugin_is_not(
    install: Install, source: str, factory: str, reason: str
) -> None:
    install(
        "ata-half",
        rewarding("whole").replace("\n@hookimpl", f"\n{source}\n@hookimpl")
        + f"; register('half', {factory}, summary='')",
    )
    registry = Registry()
    assert registry.resolve("reward", "whole") is not None
    half = record(registry, "ata-half")
    assert half.status == "loaded"
    assert reason in half.faults[0].reason
    with pytest.raises(UnknownName):
        registry.resolve("reward", "half")


def test_a_registration_that_raises_keeps_what_came_before(install: Install) -> None:
    install("ata-trip", rewarding("first") + "; 1 / 0")
    registry = Registry()
    assert "its register_rewards raised ZeroDivisionError" in record(registry, "ata-trip").faults[0].reason
    assert registry.resolve("reward", "first") is not None


# ------------------------------------------------------------------------------------------ names that clash


def test_two_plugins_that_clash_are_both_named_and_both_reachable(install: Install) -> None:
    install("ata-one", rewarding("bonus", 0.1))
    install("ata-two", rewarding("bonus", 0.2))
    registry = Registry()
    with pytest.raises(
        PluginError, match=r"registered by 'ata-one' and 'ata-two'. Write 'ata-one:bonus' or 'ata-two:bonus'"
    ):
        registry.resolve("reward", "bonus")
    for name, value in (("ata-one:bonus", 0.1), ("ATA_two:bonus", 0.2)):
        assert registry.resolve("reward", name)(None).total == value
    assert "is registered by both 'ata-two' and 'ata-one'" in record(registry, "ata-one").faults[0].reason
    assert "DISABLE_PLUGINS=ata-two" in record(registry, "ata-two").faults[0].remedy


def test_a_built_in_name_stays_the_built_ins(install: Install) -> None:
    install("ata-grab", rewarding("hybrid", 0.9))
    registry = Registry()
    assert type(registry.resolve("reward", "hybrid")).__name__ == "HybridReward"
    assert type(registry.resolve("reward", "ai-trains-ai:hybrid")).__name__ == "HybridReward"
    assert registry.resolve("reward", "ata-grab:hybrid")(None).total == 0.9
    assert "Write 'ata-grab:hybrid'" in str(record(registry, "ata-grab").faults[0])


def test_two_plugins_of_one_distribution_and_two_of_one_name(install: Install) -> None:
    install("ata-pair", rewarding("left"), point="left")
    install("ata-pair", rewarding("left"), point="right")
    install("ata-same", rewarding("other"), point="left")
    registry = Registry()
    assert {r.name for r in registry.plugins} == {"builtin", "left", "right", "ata-same.left"}
    assert registry.resolve("reward", "right:left") is not None
    assert registry.resolve("reward", "ata-same:other") is not None


# ------------------------------------------------------------------------------------------ choosing


@pytest.mark.parametrize(
    ("variable", "value", "loaded"),
    [
        ("AI_TRAINS_AI_PLUGINS", "", set()),
        ("AI_TRAINS_AI_PLUGINS", "ata-one", {"one"}),
        ("AI_TRAINS_AI_PLUGINS", "one, Ata_Two", {"one", "two"}),
        ("AI_TRAINS_AI_DISABLE_PLUGINS", "two", {"one"}),
        ("AI_TRAINS_AI_DISABLE_PLUGINS", "ata_two,one", set()),
    ],
)
def test_allow_list_and_disable_by_plugin_or_distribution(
    install: Install, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, loaded: set[str]
) -> None:
    install("ata-one", rewarding("one"), point="one")
    install("ata-two", rewarding("two"), point="two")
    monkeypatch.setenv(variable, value)
    registry = Registry()
    assert {name for name in registry.entries("reward") if not name.startswith("hybrid")} == loaded
    assert {r.name for r in registry.plugins if r.status == "disabled"} == {"one", "two"} - loaded
    if "two" not in loaded:
        with pytest.raises(PluginError, match=f"is required, but disabled: (not )?listed in {variable}"):
            Registry(required=["two"])


def test_a_name_in_the_variables_that_is_nobodys_is_told(
    install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install("ata-one", rewarding("one"))
    monkeypatch.setenv("AI_TRAINS_AI_DISABLE_PLUGINS", "ata-on")
    Registry()
    assert "names 'ata-on', which is no installed plugin. Installed: ata-one." in caplog.text


def test_what_is_required_and_not_there(install: Install) -> None:
    install("ata-one", rewarding("one"))
    with pytest.raises(PluginError, match=r"'ata-onne' is required.*Did you mean 'ata-one'"):
        Registry(required=["ata-onne"])
    Registry(required=["ata-one", "ai-trains-ai"], strict=True)


def test_a_plugin_that_was_passed_by_hand_is_not_left_out_silently(install: Install) -> None:
    class Trap:
        @property
        def register_nothing(self) -> None:
            raise RuntimeError("a property is no hook")

        @ata.hookimpl
        def on_evnt(self, event: object) -> None: ...

    with pytest.raises(PluginError, match=r"Plugin Trap: .*'on_evnt'. Did you mean 'on_event'\?"):
        Registry([Trap()])


def test_two_passed_plugins_that_clash() -> None:
    class Bonus:
        @ata.hookimpl
        def register_rewards(self, register) -> None:  # type: ignore[no-untyped-def]
            register("bonus", "some.module:Bonus", summary="")

    with pytest.raises(PluginError, match=r"by both 'Bonus#2' and 'Bonus'. Choose another name"):
        Registry([Bonus(), Bonus()]).resolve("reward", "bonus")
    same = Bonus()
    assert [r.name for r in Registry([same, same]).plugins] == ["builtin", "Bonus"]


def test_listing_imports_no_factory_and_a_missing_package_names_the_extra(install: Install) -> None:
    install(
        "ata-judge",
        HEAD + "@hookimpl\ndef register_rewards(register):\n"
        "    register('judge', 'no_such_judge:Judge', summary='an LLM judge', extra='judge')\n",
    )
    registry = Registry()
    assert record(registry, "ata-judge").registered == ("reward judge",)
    with pytest.raises(
        MissingDependency,
        match=r"'judge' of plugin ata-judge .*No module.*pip install 'ata-judge\[judge\]'",
    ):
        registry.resolve("reward", "judge")


def test_what_the_listing_shows(install: Install) -> None:
    install("ata-one", rewarding("one"))
    install("ata-bad", "1 / 0\n# <script>")
    registry = Registry()
    plugins = registry.plugins
    assert len(plugins) == 3
    assert plugins[0].name == "builtin"
    assert "reward one" in repr(plugins)
    assert "ZeroDivisionError" in repr(plugins)
    html = plugins._repr_html_()
    assert html.count("<tr>") == 4
    assert "<td>failed</td>" in html
    assert registry.why("one").splitlines()[0] == "reward 'one': always 0.5"
    assert "remedy: Repair or update ata-bad" in registry.why("ata-bad")
    with pytest.raises(UnknownName, match="Did you mean 'ata-one'"):
        registry.why("ata-onee")


def test_html_is_escaped() -> None:
    class Evil:
        @ata.hookimpl
        def register_rewards(self, register) -> None:  # type: ignore[no-untyped-def]
            register("<b>bold</b>", "m:a", summary="")

    assert "<b>" not in Registry([Evil()]).plugins._repr_html_()
