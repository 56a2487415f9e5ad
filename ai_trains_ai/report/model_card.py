"""The model card of an exported outer policy, written from its run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ai_trains_ai.errors import ConfigurationError, StorageError
from ai_trains_ai.records import Checkpoint, Exported
from ai_trains_ai.report.costs import dollars
from ai_trains_ai.report.run import Run
from ai_trains_ai.report.summary import interval


def model_card(
    run: Run, *, checkpoint: Checkpoint | None = None, exported: Exported | None = None, license: str = ""
) -> str:
    """Markdown with the model hub's front matter: how the checkpoint was chosen, held-out results, cost, integrity.

    Says what was not measured instead of leaving it out. Hidden items and the run's secret seed are in no part of it.

    Args:
        run: its folder as an object.
        checkpoint: one of the run's; default the one that was chosen when the run ended.
        exported: the export that the card is for, which knows its base model.
        license: identifier for the front matter; left out when empty.

    Raises:
        ConfigurationError: no checkpoint is given, and the run has not ended and chosen one.
    """
    chosen = (checkpoint, "picked by hand") if checkpoint else run.checkpoint
    if chosen is None:
        raise ConfigurationError(f"{run.path} has not ended, and so has no chosen checkpoint. Finish it, or name one.")
    checkpoint, rule = chosen
    config = run.folder.read_config()
    parts = config["parts"]
    outer: Mapping[str, Any] = parts["outer"]
    front = {"base_model": _base_model(outer, exported), "license": license}
    front |= {"library_name": "peft" if exported is not None and exported.kind == "adapter" else ""}
    lines = ["---", *(f"{key}: {value}" for key, value in front.items() if value), "tags:", "- ai-trains-ai", "---", ""]
    lines += [
        f"# Outer agent of the run {run.path.name}",
        "",
        "Writes reinforcement-learning jobs for small language models. Trained with ai-trains-ai: its reward was how "
        "well the models that its jobs trained did on a hidden evaluation.",
        "",
        f"* Outer trainer: {_part(outer)}; inner runner: {_part(parts['inner'])}; reward: {_part(parts['reward'])}.",
        f"* Trained on {_names(parts['families'])}; held out: {_names(parts['held_out'])}.",
        f"* Checkpoint {checkpoint.name} (version {checkpoint.version}), chosen by the rule: {rule}.",
        "",
        "## Results",
        "",
        "| measured on | mean reward | 95 % interval | episodes |",
        "|---|---|---|---|",
        *(_result(name, run, phase) for name, phase in _PROBES.items()),
        *_of_another_version(run, checkpoint),
        "",
        _training(run),
        "",
        "## Cost and integrity",
        "",
        f"{run.costs.sentence()} By kind: {_kinds(run)}.",
        "",
        _integrity(run),
        "",
        "## Made with",
        "",
        *(_plugin(plugin) for plugin in run.plugins),
        "",
    ]
    return "\n".join(lines)


def write_card(folder: Path, card: str) -> Path:
    """Write a card as the ``README.md`` of an export's folder."""
    path = Path(folder) / "README.md"
    try:
        path.write_text(card, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"Can't write {path}: {error.strerror}. Export into another folder.") from error
    return path


def _base_model(outer: Mapping[str, Any], exported: Exported | None) -> str:
    if exported is not None and exported.kind == "adapter":
        try:
            config = json.loads((Path(exported.path) / "adapter_config.json").read_text("utf-8"))
            return str(config["base_model_name_or_path"])
        except (OSError, ValueError, KeyError) as error:
            raise StorageError(
                f"{exported.path} has no readable adapter_config.json ({error}). Export again."
            ) from error
    return str(outer.get("arguments", {}).get("model", ""))


_PROBES = {"held-out tasks, untrained agent": "probe-before", "held-out tasks, trained agent": "probe-after"}


def _result(name: str, run: Run, phase: str) -> str:
    found = interval(run.probes(phase))
    if found is None:
        return f"| {name} | not measured | – | 0 |"
    return f"| {name} | {found['mean']:.3f} | {found['low']:.3f} to {found['high']:.3f} | {found['n']} |"


def _of_another_version(run: Run, checkpoint: Checkpoint) -> list[str]:
    """Said where the trained agent that was measured is not the one that is exported."""
    measured = {version for episode in run.probes("probe-after") for version in episode.policy_versions}
    if measured <= {checkpoint.version}:
        return []
    versions = ", ".join(map(str, sorted(measured)))
    return ["", f"The trained agent was measured at version {versions}, not at that of this checkpoint."]


def _training(run: Run) -> str:
    steps = run.steps
    if not steps:
        return "No update was made."
    first, last = ([step["outer/reward/mean"] for step in part] for part in (steps[:3], steps[-3:]))
    return (
        f"{len(steps)} updates. Mean training reward of the first {len(first)} steps {sum(first) / len(first):.3f}, of "
        f"the last {len(last)} {sum(last) / len(last):.3f}; these are on tasks that were trained on."
    )


def _integrity(run: Run) -> str:
    episodes = [episode for episode in run.episodes if episode.status == "finished"]
    caught = sum(any(finding.severity == "error" for finding in episode.findings) for episode in episodes)
    masked = len(run.episodes) - len(episodes)
    return (
        f"{caught} of {len(episodes)} training episodes were caught tampering and paid nothing; {masked} more were "
        "lost to infrastructure and not trained on."
    )


def _kinds(run: Run) -> str:
    return ", ".join(f"{kind} {dollars(usd)}" for kind, usd in run.costs.kind.items()) or "nothing"


def _part(part: Mapping[str, Any]) -> str:
    """A part with its numbers and names; addresses and paths are nobody's business."""
    given = {key: value for key, value in part.get("arguments", {}).items() if _public(value)}
    arguments = ", ".join(f"{key}={value!r}" for key, value in given.items())
    name = part.get("name") or part.get("class") or part.get("instance") or "?"
    return f"`{name}({arguments})`" if arguments else f"`{name}`"


def _public(value: Any) -> bool:
    if isinstance(value, str):
        return "://" not in value and not value.startswith((".", "/", "~"))
    return isinstance(value, bool | int | float)


def _plugin(plugin: Mapping[str, str]) -> str:
    named = " ".join(filter(None, (plugin["name"], plugin.get("version"))))
    return f"* {named} ({plugin.get('distribution') or 'given by hand'})"


def _names(parts: Any) -> str:
    return ", ".join(str(part.get("name") or part.get("class") or part.get("instance")) for part in parts) or "nothing"
