"""`Validator`: runs the stages, cheapest first, and makes the report."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from attrs import evolve

from ai_trains_ai.interfaces import Sandbox, TaskFamily
from ai_trains_ai.records import (
    BaseModel,
    ConfigSurface,
    Finding,
    Limits,
    Submission,
    Task,
    ValidationReport,
    content_hash,
)
from ai_trains_ai.validation import parse, rows, sanity, schema, static
from ai_trains_ai.validation.codes import StageFailed

STAGES = ("parse", "schema", "static", "load", "sanity", "review", "freeze")
PRELOAD = ("ai_trains_ai.environments.warm:warm_up", "ai_trains_ai.families.practice")
"""What a sandbox should import before its first validation: a cold one takes seconds of the limits below."""
LIMITS = Limits(wall_seconds=8.0, cpu_seconds=6, memory_bytes=512 << 20, processes=16, result_bytes=12 << 20)


def _none_reserved(key: str) -> bool:
    return False


def _no_review(submission: Submission) -> Sequence[Finding]:
    return ()


class Validator:
    """Judges submissions. Everything that the agent wrote runs in the sandbox; the verdict is made here.

    Safe to use concurrently; the caller bounds how many validations run at once.

    Args:
        sandbox: Where environments are loaded and scored; fast when it was preloaded with `PRELOAD`.
        surface: What a job may set.
        base_models: What a job may train.
        reserved: Whether an item key is of the hidden class; such rows are dropped.
        limits: Of each of the two sandboxed runs.
        review: What plugins have against a submission that passed every other stage.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        surface: ConfigSurface,
        base_models: Sequence[BaseModel],
        reserved: Callable[[str], bool] = _none_reserved,
        limits: Limits = LIMITS,
        review: Callable[[Submission], Sequence[Finding]] = _no_review,
    ) -> None:
        self._sandbox = sandbox
        self._surface = surface
        self._base_models = tuple(base_models)
        self._reserved = reserved
        self._limits = limits
        self._review = review

    async def validate(self, submission: Submission, task: Task, family: TaskFamily) -> ValidationReport:
        """The verdict on a submission to ``task``. Raises `SandboxError` when the sandbox fails: nobody's verdict."""
        started = time.monotonic()
        files = dict(submission.files)
        stage = parse.STAGE
        warnings: list[Finding] = []
        try:
            parsed = parse.parse(files)
            stage = schema.STAGE
            settings = schema.check_schema(parsed.job, self._surface, self._base_models, task.limits)
            stage = static.STAGE
            warnings += static.scan(parsed.source)
            stage = rows.STAGE
            loaded = await rows.load_rows(
                self._sandbox, files, settings.environment, self._limits, family, self._reserved
            )
            warnings += loaded.warnings
            stage = sanity.STAGE
            digest = content_hash(files)
            await sanity.check_rewards(
                self._sandbox,
                files,
                settings.environment,
                self._limits,
                family,
                loaded,
                parsed.probes,
                random.Random(digest),
            )
            stage = STAGES[-2]
            reviewed = [evolve(finding, stage=stage) for finding in self._review(submission)]
            if any(finding.severity == "error" for finding in reviewed):
                raise StageFailed(*reviewed)
            warnings += reviewed
        except StageFailed as failure:
            findings = (*failure.findings, *warnings)
            return ValidationReport(
                False, findings, stage, time.monotonic() - started, content_hash=content_hash(files)
            )
        return ValidationReport(
            valid=True,
            findings=tuple(warnings),
            stage=STAGES[-1],
            seconds=time.monotonic() - started,
            base_model=settings.base_model,
            config=settings.config,
            configured=settings.configured,
            environment=settings.environment,
            rows=loaded.rows,
            dropped_rows=loaded.total - len(loaded.rows),
            content_hash=digest,
        )
