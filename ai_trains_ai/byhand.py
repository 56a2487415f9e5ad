"""One submission by hand, without an outer agent: validate a folder, run it as a job, evaluate what came out."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define, evolve, frozen

from ai_trains_ai.blocking import run_blocking
from ai_trains_ai.environments.versions import require_verifiers
from ai_trains_ai.errors import ConfigurationError, SubmissionRejected, UnknownName
from ai_trains_ai.interfaces import InnerJobRunner, RunContext, TaskFamily
from ai_trains_ai.loop.settings import limited
from ai_trains_ai.plugins import Hooks, Registry, Spec
from ai_trains_ai.records import (
    Baseline,
    Budget,
    EpisodeOutcome,
    Evaluation,
    JobResult,
    Reward,
    SamplingParams,
    Submission,
    Task,
    TrainingJob,
    ValidationReport,
)
from ai_trains_ai.session import open_context
from ai_trains_ai.store import RunFolder, Store

logger = logging.getLogger(__name__)

FILES = ("environment.py", "job.toml", "probes.jsonl")
LONGEST = 1 << 20  # bytes read of a file
EMBEDDED = Spec("job_runner", "embedded")


@frozen
class JobReport:
    """What a job by hand came to."""

    task: Task
    report: ValidationReport
    result: JobResult
    evaluation: Evaluation | None
    baselines: tuple[Baseline, ...]
    reward: Reward


@define
class _Bench:
    """The parts that a job by hand needs, started."""

    run: RunContext
    runner: InnerJobRunner
    evaluation: Any
    validator: Any


def validate(
    folder: str | Path,
    task: str = "chained-arithmetic-2-3",
    *,
    runner: Any = EMBEDDED,
    sandbox: Any = "bubblewrap",
    plugins: Sequence[object] = (),
) -> ValidationReport:
    """The verdict on the submission in ``folder``. Blocking; also works in a notebook cell.

    Args:
        folder: holds ``environment.py`` and ``job.toml`` (and perhaps ``probes.jsonl``).
        task: id of the task that it is for.
        runner: whose config surface and base models count.
        sandbox: where the environment is loaded and scored.
        plugins: plugin objects besides the installed ones; they may review the submission.
    """
    registry = Registry(plugins)
    submission, (family, found) = read_submission(folder), find_task(registry, task)

    async def check() -> ValidationReport:
        async with _bench(registry, runner, sandbox, serve=False) as bench:
            report: ValidationReport = await bench.validator.validate(submission, limited(found, bench.runner), family)
            return report

    return run_blocking(check())


async def run_job(
    folder: str | Path,
    task: str = "chained-arithmetic-2-3",
    *,
    runner: Any = EMBEDDED,
    reward: Any = "hybrid",
    sandbox: Any = "bubblewrap",
    plugins: Sequence[object] = (),
    on_progress: Callable[[int, Mapping[str, float]], None] | None = None,
    seed: int = 0,
    eval_items: int = 256,
    eval_tokens: int = 12,
) -> JobReport:
    """Validate, train and evaluate the submission in ``folder``.

    Raises:
        SubmissionRejected: it doesn't validate; the report is in ``.report``.
        UnknownName: no such task.
    """
    registry = Registry(plugins)
    pay = registry.resolve("reward", reward)
    submission, (family, found) = read_submission(folder), find_task(registry, task)
    async with _bench(registry, runner, sandbox, eval_items=eval_items, eval_tokens=eval_tokens) as bench:
        found = limited(found, bench.runner)
        report = await bench.validator.validate(submission, found, family)
        if not report.valid:
            raise SubmissionRejected(f"{folder} does not validate:\n{report.text()}", report)
        job = TrainingJob(
            "by-hand", "by-hand", found.id, report.base_model, submission.files, report.config, report.environment,
            report.rows, seed, found.limits, submission.content_hash,
        )  # fmt: skip
        handle = await bench.runner.submit(job)
        result = await bench.runner.wait(handle, on_progress)
        baselines = await bench.evaluation.baselines(found, bench.runner, lambda baseline: None)
        evaluation = None
        if result.status == "succeeded":
            evaluation = await bench.evaluation.trained(found, bench.runner, handle, job.base_model)
        await bench.runner.release(handle)
    from ai_trains_ai.evaluation import paired_difference

    paired, stderr = paired_difference(evaluation, baselines) if evaluation else (0.0, 0.0)
    outcome = EpisodeOutcome(found, 1, 1, report, result, evaluation, baselines, paired, stderr)
    return JobReport(found, evolve(report, rows=()), result, evaluation, baselines, pay(outcome))


async def evaluate(
    base_model: str,
    task: str = "chained-arithmetic-2-3",
    *,
    runner: Any = EMBEDDED,
    sandbox: Any = "bubblewrap",
    plugins: Sequence[object] = (),
    eval_items: int = 256,
    eval_tokens: int = 12,
) -> Evaluation:
    """The hidden score of an untrained base model on a task, on items drawn for this call."""
    registry = Registry(plugins)
    _, found = find_task(registry, task)
    async with _bench(registry, runner, sandbox, eval_items=eval_items, eval_tokens=eval_tokens) as bench:
        known = [model.name for model in bench.runner.base_models()]
        if base_model not in known:
            raise UnknownName.of("base model", base_model, known)
        baselines = await bench.evaluation.baselines(found, bench.runner, lambda baseline: None)
        return next(b.evaluation for b in baselines if b.base_model == base_model)


def find_task(registry: Registry, task_id: str) -> tuple[TaskFamily, Task]:
    """The task with this id among all registered families, and its family."""
    tasks = {task.id: (family, task) for family, found in _families(registry).values() for task in found}
    if task_id not in tasks:
        raise UnknownName.of("task", task_id, tasks)
    return tasks[task_id]


def _families(registry: Registry) -> dict[str, tuple[TaskFamily, Sequence[Task]]]:
    """All registered families with their tasks, by name. A plugin's broken one, or one that takes a name that is taken,
    is logged and left out: it must not stand in the way of others.
    """
    found: dict[str, tuple[TaskFamily, Sequence[Task]]] = {}
    for label in registry.entries("task_family"):
        try:
            family: TaskFamily = registry.resolve("task_family", label)
            tasks = family.tasks()
        except Exception as error:
            logger.warning("The task family %r is left out: %s", label, error)
            continue
        if family.name in found:
            logger.warning("The task family %r is left out: its name %r is taken.", label, family.name)
        else:
            found[family.name] = (family, tasks)
    return found


def read_submission(folder: str | Path) -> Submission:
    """The submission files of a folder on disk."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is no folder. Give the one that holds environment.py and job.toml.")
    files = {}
    for name in FILES:
        if (folder / name).is_file():
            try:
                with (folder / name).open("rb") as file:
                    files[name] = file.read(LONGEST)  # what is longer still gets its finding
            except OSError as error:
                raise ConfigurationError(f"{folder / name} can't be read: {error.strerror}.") from error
    return Submission.of("by-hand", 1, files)


@contextlib.asynccontextmanager
async def _bench(
    registry: Registry, runner: Any, jail: Any, *, serve: bool = True, eval_items: int = 256, eval_tokens: int = 12
) -> AsyncIterator[_Bench]:
    from ai_trains_ai.evaluation import HiddenEvaluation
    from ai_trains_ai.families.hidden import reserved
    from ai_trains_ai.validation import PRELOAD, Validator

    require_verifiers()
    hooks = Hooks(registry.manager)
    chosen: InnerJobRunner = registry.resolve("job_runner", runner)
    sandbox = registry.resolve("sandbox", jail)
    sandbox.preload(*PRELOAD, *chosen.sandbox_preload)
    with tempfile.TemporaryDirectory(prefix="ata-") as temporary:
        folder = RunFolder(Path(temporary) / "run")
        folder.create({})
        store = Store.create(folder.database)
        run = open_context(folder, store, sandbox, Budget(), 0, hooks)
        families = {name: family for name, (family, _) in _families(registry).items()}
        params = SamplingParams(max_tokens=eval_tokens)
        evaluation = HiddenEvaluation(families, folder.secret(), n=eval_items, params=params)
        surface, models = chosen.config_surface(), chosen.base_models()
        validator = Validator(sandbox, surface, models, reserved=reserved, review=hooks.review_submission)
        try:
            await sandbox.start()
            if serve:
                await chosen.start(run)
            yield _Bench(run, chosen, evaluation, validator)
        finally:
            if serve:
                await chosen.close(drain=False)
            await sandbox.close()
            store.close()
