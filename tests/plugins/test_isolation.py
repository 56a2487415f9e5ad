"""Odd plugins, installed or passed: each is one fault, and the others and the run go on."""

from __future__ import annotations

import asyncio
import functools
import threading
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from attrs import define

import ai_trains_ai as ata
from ai_trains_ai import events
from ai_trains_ai.errors import ConfigurationError, PluginError, StorageError, UnknownName
from ai_trains_ai.plugins import Hooks, Registry
from ai_trains_ai.plugins.scaffold import write_plugin
from ai_trains_ai.records import Finding, Submission, TrainStep

from .conftest import HEAD, Install, rewarding

HOOK = HEAD + "@hookimpl\ndef register_rewards(register):\n    "
PLUGIN = HEAD + "class P:\n  @hookimpl\n  def on_event(self, event): ...\n"
ODD = {
    "exit in a hook": (HOOK + "raise SystemExit(3)\n", "", "its register_rewards raised SystemExit: 3"),
    "our own error in a hook": (
        HOOK + "from ai_trains_ai.errors import PluginError; raise PluginError('mine')\n",
        "",
        "its register_rewards raised PluginError: mine",
    ),
    "cancelled in a hook": (HOOK + "import asyncio; raise asyncio.CancelledError\n", "", "raised CancelledError"),
    "a panic at import": ("class Panic(BaseException): ...\nraise Panic('rust')\n", "", "raised Panic: rust"),
    "a message that raises": (
        "class E(Exception):\n  def __str__(self): raise ValueError\nraise E\n",
        "",
        "raised E: its message can't be shown",
    ),
    "a broken signature": (
        HEAD + "@hookimpl\ndef on_event(event): ...\non_event.__signature__ = 7\n",
        "",
        "looking at it raised TypeError",
    ),
    "no entry point": (rewarding("x"), "a:b:c", "is no 'module' or 'module:attribute'"),
    "a missing summary": (HOOK + "register('x', 'a:b')\n", "", "register() missing 1 required keyword-only"),
    "a summary that is none": (HOOK + "register('x', 'a:b', summary=5)\n", "", "with summary=5"),
    "an import string that is none": (HOOK + "register('x', 'a b:c', summary='')\n", "", "import string 'a b:c'"),
    "an asynchronous call": (
        HEAD
        + "class F:\n  async def __call__(self): ...\n"
        + HOOK.removeprefix(HEAD)
        + "register('x', F(), summary='')\n",
        "",
        "asynchronous factory",
    ),
    "positional only": (HEAD + "@hookimpl\ndef on_event(event, /): ...\n", "", "is positional-only"),
    "a marked partial": (
        HEAD + "import functools\non_event = hookimpl(functools.partial(print))\n",
        "",
        "is a partial, which pluggy passes over",
    ),
}


@pytest.mark.parametrize(("source", "attribute", "reason"), ODD.values(), ids=ODD)
def test_an_odd_plugin_is_one_fault(install: Install, source: str, attribute: str, reason: str) -> None:
    install("ata-able", rewarding("able"))
    install("ata-odd", source, attribute=attribute)
    install("ata-zeal", rewarding("zeal"))
    registry = Registry()
    found = registry.plugins
    assert reason in str(found.find("ata-odd").faults[0])
    assert {"able", "zeal"} <= set(registry.entries("reward"))
    with pytest.raises(PluginError, match="ata-odd"):
        Registry(required=["ata-odd"])


@pytest.mark.parametrize("points", ["[ai_trains_ai]\nno equals sign\n", "[ai_trains_ai]\nlost = gone\n"])
def test_a_distribution_that_was_removed_half_way(install: Install, tmp_path: Path, points: str) -> None:
    install("ata-able", rewarding("able"))
    remains = tmp_path / "ata_lost-1.0.dist-info"
    remains.mkdir()
    (remains / "entry_points.txt").write_text(points)
    registry = Registry()
    assert registry.resolve("reward", "able") is not None
    (lost,) = (r for r in registry.plugins if r.status == "failed")
    assert lost.called("ata-lost")


def test_names_that_collide_take_nobody_away(install: Install) -> None:
    install("ata-aa", rewarding("one"), point="p")
    install("ata-bb", rewarding("two"), point="p")
    install("ata-cc", rewarding("three"), point="ata-bb.p")
    registry = Registry()
    assert {"one", "two", "three"} <= set(registry.entries("reward"))
    assert {r.distribution for r in registry.plugins if r.status == "loaded"} >= {"ata-aa", "ata-bb", "ata-cc"}


def test_one_name_from_two_plugins_of_a_distribution_is_told_apart(install: Install) -> None:
    install("ata-pair", rewarding("same", 0.1), point="left")
    install("ata-pair", rewarding("same", 0.2), point="right")
    registry = Registry()
    with pytest.raises(PluginError, match="may be 'left:same' or 'right:same'"):
        registry.resolve("reward", "ata-pair:same")
    assert registry.resolve("reward", "right:same")(None).total == 0.2
    with pytest.raises(UnknownName, match=r"no reward of left named 'some'. Did you mean 'same'"):
        registry.resolve("reward", "left:some")


def test_a_lazy_module_is_not_made_to_import(install: Install) -> None:
    lazy = rewarding("lazy") + "\ndef __getattr__(name): raise RuntimeError(name)\ndef __dir__(): return ['on_event']\n"
    install("ata-lazy", lazy)
    assert not Registry().plugins.find("ata-lazy").faults


# ------------------------------------------------------------------------------------------ passed by hand


def test_plugins_that_are_equal_are_still_two() -> None:
    @define
    class Counts(ata.EventHandler):
        seen: int = 0

        def on_step_started(self, event: events.StepStarted) -> None:
            self.seen += 1

    one, two = Counts(), Counts()
    Hooks(Registry([one, two]).manager).on_event(events.StepStarted(0))
    assert (one.seen, two.seen) == (1, 1)


def test_what_is_wrong_with_a_passed_plugin_shows_when_it_is_passed() -> None:
    class Trips:
        @ata.hookimpl
        def register_rewards(self, register: Any) -> None:
            raise ValueError("no")

    class Above:
        @ata.hookimpl
        @staticmethod
        def on_event(event: events.Event) -> None: ...

    class Later:
        @ata.hookimpl(optionalhook=True)
        def on_some_day(self, event: events.Event) -> None: ...

    with pytest.raises(PluginError, match="Plugin Trips: its register_rewards raised ValueError: no"):
        Registry([Trips()])
    with pytest.raises(PluginError, match=r"is marked above @staticmethod.*Put @hookimpl below @staticmethod"):
        Registry([Above()])
    with pytest.raises(PluginError, match=r"'good' is a text. Installed plugins load by themselves"):
        Registry(["good"])
    Registry([Later()])


@pytest.mark.parametrize("required", [5, "ata-x", [None]])
def test_required_is_a_list_of_names(required: Any) -> None:
    with pytest.raises(ConfigurationError, match="required takes a list of plugin names"):
        Registry(required=required)


# ------------------------------------------------------------------------------------------ during a run


@pytest.mark.parametrize("raised", [SystemExit(2), asyncio.CancelledError(), GeneratorExit()])
def test_no_exception_of_an_observer_comes_out(raised: BaseException) -> None:
    class Exits:
        @ata.hookimpl
        def on_event(self, event: events.Event) -> None:
            raise raised

    hooks = Hooks(Registry([Exits()]).manager)
    hooks.on_event(events.StepStarted(0))
    assert hooks.failures["Exits"].count == 1


def test_an_event_that_can_not_be_copied_is_handed_out_as_it_is() -> None:
    seen: list[Any] = []

    class Sees:
        @ata.hookimpl
        def on_event(self, event: Any) -> None:
            seen.append(event)

    for metrics in (MappingProxyType({"a": 1.0}), {"a": threading.Lock()}):
        hooks = Hooks(Registry([Sees()]).manager)
        hooks.on_event(events.StepFinished(0, TrainStep(0, {}), metrics))  # type: ignore[arg-type]
        assert not hooks.failures
    assert len(seen) == 2


def test_a_hook_that_returns_something_to_await_is_counted() -> None:
    async def later() -> None: ...

    class Sends:
        @ata.hookimpl
        def on_event(self, event: events.Event) -> Any:
            return later()

    hooks = Hooks(Registry([Sends()]).manager)
    hooks.on_event(events.StepStarted(0))
    assert "nobody awaits a hook" in hooks.failures["Sends"].first


@pytest.mark.parametrize("finding", [Finding("a", "", "m", severity="fatal"), Finding("a", "", 7)])  # type: ignore[arg-type]
def test_a_finding_that_could_not_be_read_again_is_the_plugins_failure(finding: Finding) -> None:
    class Judges:
        @ata.hookimpl
        def review_submission(self, submission: Submission) -> list[Finding]:
            return [finding]

    hooks = Hooks(Registry([Judges()]).manager)
    (found,) = hooks.review_submission(Submission.of("e", 1, {}))
    assert (found.code, found.severity) == ("review-failed", "warning")


def test_each_hook_of_a_plugin_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Twice:
        @ata.hookimpl
        def on_event(self, event: events.Event) -> None:
            raise ValueError("event")

        @ata.hookimpl
        def before_spend(self, charge: Any) -> None:
            raise ValueError("spend")

    hooks = Hooks(Registry([Twice()]).manager)
    for _ in range(3):
        hooks.on_event(events.StepStarted(0))
        hooks.before_spend(None, None)  # type: ignore[arg-type]
    told = [r.getMessage() for r in caplog.records if "Plugin Twice failed" in r.getMessage()]
    assert [message.partition(" failed in ")[2] for message in told] == [
        "on_event: ValueError: event",
        "before_spend: ValueError: spend",
    ]
    assert hooks.failures["Twice"].count == 6


# ------------------------------------------------------------------------------------------ handlers


def test_methods_of_a_handler_that_would_never_work() -> None:
    class Mixin:
        def on_step_finishd(self, event: events.Event) -> None: ...

    with pytest.raises(ConfigurationError, match=r"on_step_finishd.*Did you mean 'on_step_finished'"):
        type("Mixed", (Mixin, ata.EventHandler), {})
    with pytest.raises(ConfigurationError, match="is asynchronous"):

        class Later(ata.EventHandler):
            async def on_step_finished(self, event: events.Event) -> None: ...  # type: ignore[override]

    with pytest.raises(ConfigurationError, match="must take the event"):

        class Short(ata.EventHandler):
            def on_step_finished(self) -> None: ...  # type: ignore[override]

    class Fine(ata.EventHandler):
        on_error_policy = "x"
        on_step_finished = functools.lru_cache(lambda self, event: None)  # type: ignore[assignment]

    Hooks(Registry([Fine()]).manager).on_event(events.StepStarted(0))


# ------------------------------------------------------------------------------------------ what a user writes


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (":Foo", "is no registered name, and no 'module:attribute'"),
        (".rel:Foo", "is no registered name, and no 'module:attribute'"),
        ("a:b:c", "is no registered name, and no 'module:attribute'"),
        ("plugin_syntax:F", "can't be imported: SyntaxError"),
        ("plugin_needs:F", "can't be imported: ModuleNotFoundError: No module named 'no_such_thing'"),
        ("json:Nope", "'json' has no 'Nope'"),
        ("json:dumps", r"'json:dumps': missing a required argument: 'obj'"),
        ("builtins:object", "the class object is not an ai_trains_ai.RewardFn"),
    ],
)
def test_a_reference_that_leads_nowhere_is_one_clear_line(
    reference: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugin_syntax.py").write_text("def (")
    (tmp_path / "plugin_needs.py").write_text("import no_such_thing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=message) as caught:
        Registry().resolve("reward", reference)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", r"reward 'late' of plugin ata-late \(ata-late\) gave None: a NoneType"),
        ("raise ValueError('no key')", r"'late' of plugin ata-late \(ata-late\) can't be made: ValueError: no key"),
    ],
)
def test_a_factory_that_fails_names_its_plugin(install: Install, body: str, message: str) -> None:
    install(
        "ata-late",
        HEAD + f"def make():\n    {body}\n" + HOOK.removeprefix(HEAD) + "register('late', make, summary='')\n",
    )
    with pytest.raises(ConfigurationError, match=message):
        Registry().resolve("reward", "late")


def test_a_factory_that_is_not_there_names_its_plugin(install: Install) -> None:
    install("ata-gone", HOOK + "register('gone', 'json:Nope', summary='')\n")
    with pytest.raises(PluginError, match=r"'gone' of plugin ata-gone .*'json' has no 'Nope'"):
        Registry().resolve("reward", "gone")


def test_specs() -> None:
    with pytest.raises(UnknownName, match=r"no kind of part named 'rewards'. Did you mean 'reward'"):
        ata.Spec("rewards", "hybrid")
    assert ata.tracker("wandb", name="mine").arguments == {"name": "mine"}
    with pytest.raises(ConfigurationError, match="Its signature is"):  # a name there is no part of an outer trainer
        Registry().resolve("outer_trainer", ata.outer_trainer("embedded", provider="openai"))


@pytest.mark.parametrize(
    "name", ["ata-1", "ata-3d", "class", "json", "numpy", "ai-trains-ai", "ata-hybrid", "ata-local"]
)
def test_a_plugin_that_would_break_or_shadow_something_is_not_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"taken|can't be the name"):
        write_plugin(name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Can't write"):
        write_plugin("ata-x", tmp_path / "file" / "sub")
