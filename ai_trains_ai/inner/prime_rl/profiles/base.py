"""The form of a version's profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from ai_trains_ai.inner.prime_rl.memory import Plan


@frozen
class Site:
    """Where a job runs: paths and ports on the pod, names of our modules there, and the deadlines of a rollout.

    Attributes:
        folder: The engine's output folder, fresh for every attempt.
        model: Folder of the pristine base model.
        taskset: Id of the taskset; its module has the same name with underscores.
        harness: Id of our harness, which runs a rollout inside the env server's process.
        renderer: Name of the chat renderer: the engine can't tell it from a folder.
    """

    folder: str
    model: str
    taskset: str = "ata-job"
    harness: str = "ata-harness"
    renderer: str = "qwen3"
    inference_port: int = 8000
    env_port: int = 5000
    rollout_port: int = 5555
    rollout_seconds: float = 120.0
    scoring_seconds: float = 30.0
    ready_seconds: int = 420

    @property
    def inference_url(self) -> str:
        return f"http://127.0.0.1:{self.inference_port}/v1"


@frozen
class Locks:
    """What the harness's own settings are made of, besides the site."""

    plan: Plan
    seq_len: int
    seed: int


@frozen
class Place:
    """Where a key of the surface goes in rl.toml. ``[]`` in a path is the one table of an array.

    ``form`` turns the key's value into the engine's.
    """

    path: str
    form: Callable[[Any], Any] = lambda value: value


@frozen
class Layout:
    """Where the engine leaves its files, relative to the site's folder; ``{step}`` is filled in.

    ``weights`` is what a finished job leaves, ``broadcasts`` the newest policies of a running one (the salvage of a job
    that is ended early); each such folder is complete once ``marker`` is in it. ``metrics`` is by writer, ``configs``
    and ``logs`` by process.
    """

    weights: str
    broadcasts: str
    marker: str
    metrics: Mapping[str, str]
    configs: Mapping[str, str]
    logs: Mapping[str, str]
    merged: bool
    """Whether ``weights`` of a LoRA job are merged into the model; otherwise they are the adapter alone."""


@frozen
class Profile:
    """A version of prime-rl: where every key goes, what the harness locks, where the engine leaves its files.

    ``image`` is the published container and ``verifiers`` the version that it has.
    """

    version: str
    image: str
    verifiers: str
    places: Mapping[str, Place]
    locked: Callable[[Site, Locks], Mapping[str, Any]]
    layout: Layout
