"""One episode from its opening to its reward: conversation, validation, job, hidden evaluation."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Sequence
from typing import Any

from attrs import evolve

from ai_trains_ai.agent import Rollout, open_workspace, opening, play
from ai_trains_ai.agent.rollout import segments
from ai_trains_ai.errors import ConfigurationError, PolicyError, ProviderError, SandboxError
from ai_trains_ai.evaluation import HiddenEvaluation, paired_difference
from ai_trains_ai.events import (
    BaselineMeasured,
    EpisodeFinished,
    EpisodeStarted,
    Evaluated,
    IntegrityFound,
    JobFinished,
    JobProgress,
    JobStarted,
    SubmissionValidated,
)
from ai_trains_ai.interfaces import Policy, RunContext, Sandbox
from ai_trains_ai.loop.groups import PlannedGroup
from ai_trains_ai.loop.settings import LoopSettings, Parts
from ai_trains_ai.loop.watchdog import Watchdog
from ai_trains_ai.records import (
    Baseline,
    Episode,
    EpisodeOutcome,
    Evaluation,
    Finding,
    JobHandle,
    JobResult,
    Reward,
    SandboxResult,
    Submission,
    Task,
    TrainingJob,
    ValidationReport,
)
from ai_trains_ai.threads import usable_cores
from ai_trains_ai.validation import Validator

logger = logging.getLogger(__name__)

# what may fail without anybody's fault: the episode is then masked
INFRASTRUCTURE = (SandboxError, ProviderError, PolicyError)


class Episodes:
    """Plays episodes of a run. Everything that took time is stored the moment it is done."""

    def __init__(
        self,
        parts: Parts,
        settings: LoopSettings,
        run: RunContext,
        validator: Validator,
        evaluation: HiddenEvaluation,
        watchdog: Watchdog,
    ) -> None:
        self._parts, self._settings, self._run = parts, settings, run
        self._waiting = watchdog.waiting
        self._validator, self._evaluation = validator, evaluation
        self._gate = asyncio.Semaphore(usable_cores())  # sandboxed runs of agents; more at once only slows each

    async def baselines(self, task: Task) -> tuple[Baseline, ...]:
        """Every untrained base model on a task; measured once a run."""

        def keep(baseline: Baseline) -> None:
            self._run.store.save_evaluation("baseline", baseline.evaluation)
            self._run.emit(BaselineMeasured(baseline, time=self._run.clock()))

        with self._waiting("baselines", task.id):
            return await self._evaluation.baselines(task, self._parts.runner, keep)

    async def play(self, group: PlannedGroup, index: int, policy: Policy) -> Episode:
        """A new episode under ``policy``."""
        run, task, begin = self._run, group.task, self._run.clock()
        episode_id = f"{group.id}e{index}"
        run.store.forget_submissions(episode_id)  # of a session that was killed in the middle of it
        run.emit(EpisodeStarted(episode_id, task.id, policy.version, time=begin))
        try:
            with self._waiting("the agent's conversation", episode_id):
                rollout = await self._converse(episode_id, task, policy)
            baselines = await self.baselines(task)
        except INFRASTRUCTURE as error:
            blank = Episode(episode_id, group.id, task.id, index, "infrastructure", "", (), (), (), 0, None)
            return self._masked(evolve(blank, seconds=run.clock() - begin), error)
        episode = self._draft(episode_id, group, index, rollout, run.clock() - begin)
        if rollout.submission is None or rollout.report is None:
            outcome = EpisodeOutcome(task, episode.attempts, None, baselines=baselines)
            return self._finish(self._reviewed(episode, outcome, None))
        job = self._job(episode, task, rollout.submission, rollout.report)
        episode = evolve(episode, job_id=job.id, base_model=job.base_model)
        handle = JobHandle(job.id)
        run.store.save_intent(episode, job, handle)
        return await self._complete(episode, task, job, handle, None)

    async def resume(self, episode: Episode, task: Task) -> Episode:
        """An episode that had submitted its job when the run stopped: go on from the last thing that was stored."""
        job, handle, result = self._run.store.job(episode.job_id)
        if result is not None and result.status in ("lost", "cancelled"):
            result = None  # nobody's verdict: run it again
        return await self._complete(episode, task, job, handle, result)

    async def _converse(self, episode_id: str, task: Task, policy: Policy) -> Rollout:
        parts, settings = self._parts, self._settings
        models, surface = parts.runner.base_models(), parts.runner.config_surface()
        shown = await self.baselines(task) if settings.show_baselines else None

        async def validate(submission: Submission) -> ValidationReport:
            with self._waiting("validation", episode_id):
                async with self._gate:
                    report = await checked(submission)
            self._run.store.save_submission(submission, report)
            event = SubmissionValidated(episode_id, submission.attempt, report, time=self._run.clock())
            self._run.emit(event)
            return report

        async def checked(submission: Submission) -> ValidationReport:
            family = parts.families[task.family]
            try:
                return await self._validator.validate(submission, task, family)
            except SandboxError as error:
                logger.warning("Validation of %s is tried once more: %s", episode_id, error)
                return await self._validator.validate(submission, task, family)

        return await play(
            episode_id,
            opening(task, models, shown),
            open_workspace(task, models, shown, surface),
            policy,
            validate,
            _Gated(parts.sandbox, self._gate),
            evolve(settings.params, seed=self._seed(episode_id)),
            task.limits.attempts,
        )

    def _draft(self, episode_id: str, group: PlannedGroup, index: int, rollout: Rollout, seconds: float) -> Episode:
        return Episode(
            episode_id,
            group.id,
            group.task.id,
            index,
            "finished",
            rollout.end,
            rollout.messages,
            segments(rollout.turns),
            tuple(sorted({turn.policy_version for turn in rollout.turns})),
            attempts=len(rollout.reports),
            valid_attempt=len(rollout.reports) if rollout.submission else None,
            reports=rollout.reports,
            seconds=seconds,
        )

    def _job(self, episode: Episode, task: Task, submission: Submission, report: ValidationReport) -> TrainingJob:
        return TrainingJob(
            f"{episode.id}-job",
            episode.id,
            task.id,
            report.base_model,
            submission.files,
            report.config,
            report.environment,
            report.rows,
            self._seed(episode.id + "/job"),
            task.limits,
            submission.content_hash,
        )

    async def _complete(
        self, episode: Episode, task: Task, job: TrainingJob, handle: JobHandle, result: JobResult | None
    ) -> Episode:
        """Job, hidden evaluation and reward, as far as they aren't stored yet."""
        run, runner, begin = self._run, self._parts.runner, self._run.clock()
        try:
            evaluation = run.store.evaluation_of(job.id)
            if result is None or (result.status == "succeeded" and evaluation is None):
                result, handle = await self._run_job(episode, job, handle)
            if result.status == "succeeded" and evaluation is None:
                with self._waiting("the hidden evaluation", episode.id):
                    evaluation = await self._evaluation.trained(task, runner, handle, job.base_model)
                run.store.save_evaluation("job", evaluation, job.id)
                run.emit(Evaluated(evaluation, job.id, time=run.clock()))
            paid = self._paid(episode, task, job, result, evaluation, await self.baselines(task))
            return self._finish(evolve(paid, seconds=episode.seconds + run.clock() - begin))
        except INFRASTRUCTURE as error:
            return self._masked(evolve(episode, seconds=episode.seconds + run.clock() - begin), error)
        finally:
            await runner.release(handle)

    async def _run_job(self, episode: Episode, job: TrainingJob, handle: JobHandle) -> tuple[JobResult, JobHandle]:
        """Find the job again, or run it."""
        run, runner = self._run, self._parts.runner
        handle = await runner.attach(handle) or await runner.submit(job)
        run.store.save_handle(handle)
        run.emit(JobStarted(job.id, episode.id, job.base_model, time=run.clock()))
        with self._waiting("the end of its job", episode.id):
            result = await runner.wait(
                handle, lambda step, metrics: run.emit(JobProgress(job.id, step, metrics, time=run.clock()))
            )
        result = self._parts.hooks.classify_failure(job, result)
        run.store.save_result(result)
        run.emit(JobFinished(result, time=run.clock()))
        return result, handle

    def _paid(
        self,
        episode: Episode,
        task: Task,
        job: TrainingJob,
        result: JobResult,
        evaluation: Evaluation | None,
        baselines: tuple[Baseline, ...],
    ) -> Episode:
        failure = result.failure
        if result.status in ("lost", "cancelled") or (failure and failure.side == "infrastructure"):
            return evolve(episode, status="infrastructure", note=failure.message if failure else result.status)
        paired, stderr = paired_difference(evaluation, baselines) if evaluation else (0.0, 0.0)
        outcome = EpisodeOutcome(
            task,
            episode.attempts,
            episode.valid_attempt,
            episode.reports[-1],
            result,
            evaluation,
            baselines,
            paired,
            stderr,
        )
        post = evaluation.mean if evaluation else None
        uplift = None if post is None else post - outcome.best_baseline
        submission = Submission(episode.id, episode.valid_attempt or 0, job.files, job.content_hash)
        return self._reviewed(evolve(episode, post=post, uplift=uplift), outcome, submission)

    def _reviewed(self, episode: Episode, outcome: EpisodeOutcome, submission: Submission | None) -> Episode:
        """The episode with what checks and reviewers have against it, and paid accordingly."""
        hooks = self._parts.hooks
        findings: tuple[Finding, ...] = hooks.review_episode(episode)
        if submission is not None:
            findings = (*hooks.check_integrity(self._parts.integrity_checks, submission, outcome), *findings)
        for finding in findings:
            self._run.emit(IntegrityFound(episode.id, finding, time=self._run.clock()))
        errors = [finding.text() for finding in findings if finding.severity == "error"]
        reward = self._pay(evolve(outcome, tampered="; ".join(errors)))
        return evolve(episode, reward=reward, findings=findings)

    def _pay(self, outcome: EpisodeOutcome) -> Reward:
        """The reward, if it is one: a NaN would poison its group, and the run would only say so much later."""
        function = self._parts.reward
        reward = function(outcome)
        name = type(function).__name__
        if not isinstance(reward, Reward):
            raise ConfigurationError(
                f"{name} returned {reward!r}, not a Reward. Return ata.Reward(total, components, weights)."
            )
        odd = [key for key, value in {"total": reward.total, **reward.components}.items() if not math.isfinite(value)]
        if odd:
            raise ConfigurationError(f"{name} gave a {', '.join(odd)} that is not finite on {outcome.task.id}.")
        return reward

    def _masked(self, episode: Episode, error: Exception) -> Episode:
        """Infrastructure failed: the episode is kept, but never trained on."""
        logger.warning("Episode %s is masked: %s", episode.id, error)
        return self._finish(evolve(episode, status="infrastructure", note=str(error)))

    def _finish(self, episode: Episode) -> Episode:
        self._run.store.save_episode(episode, "finished")
        self._run.emit(EpisodeFinished(episode, time=self._run.clock()))
        return episode

    def _seed(self, purpose: str) -> int:
        digest = hashlib.sha256(f"{self._settings.seed}/{purpose}".encode()).digest()
        return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


class _Gated(Sandbox):
    """The run's sandbox for tools of agents, so many runs at once as the gate lets through."""

    def __init__(self, sandbox: Sandbox, gate: asyncio.Semaphore) -> None:
        self._sandbox, self._gate = sandbox, gate
        self.guarantees = sandbox.guarantees

    async def run(self, target: str, payload: bytes, **options: Any) -> SandboxResult:
        async with self._gate:
            return await self._sandbox.run(target, payload, **options)

    def preload(self, *targets: str) -> None:
        self._sandbox.preload(*targets)

    def another(self, preload: Sequence[str] = ()) -> Sandbox:
        return self._sandbox.another(preload)

    async def start(self) -> None:
        await self._sandbox.start()

    async def close(self) -> None:
        """The sandbox belongs to the run."""
