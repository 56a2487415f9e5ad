"""One episode from its opening to its reward: conversation, validation, job, hidden evaluation."""

from __future__ import annotations

import asyncio
import hashlib
import logging

from attrs import evolve

from ai_trains_ai.agent import Rollout, open_workspace, opening, play
from ai_trains_ai.agent.rollout import segments
from ai_trains_ai.errors import SandboxError
from ai_trains_ai.evaluation import HiddenEvaluation, paired_stderr
from ai_trains_ai.events import (
    BaselineMeasured,
    EpisodeFinished,
    EpisodeStarted,
    Evaluated,
    JobFinished,
    JobProgress,
    JobStarted,
    SubmissionValidated,
)
from ai_trains_ai.interfaces import Policy, RunContext
from ai_trains_ai.loop.groups import PlannedGroup
from ai_trains_ai.loop.settings import LoopSettings, Parts
from ai_trains_ai.records import (
    Baseline,
    Episode,
    EpisodeOutcome,
    Evaluation,
    JobHandle,
    JobResult,
    Submission,
    Task,
    TrainingJob,
    ValidationReport,
)
from ai_trains_ai.threads import usable_cores
from ai_trains_ai.validation import Validator

logger = logging.getLogger(__name__)


class Episodes:
    """Plays episodes of a run. Everything that took time is stored the moment it is done."""

    def __init__(
        self, parts: Parts, settings: LoopSettings, run: RunContext, validator: Validator, evaluation: HiddenEvaluation
    ) -> None:
        self._parts, self._settings, self._run = parts, settings, run
        self._validator, self._evaluation = validator, evaluation
        self._validating = asyncio.Semaphore(usable_cores())  # more at once would only make each slower

    async def baselines(self, task: Task) -> tuple[Baseline, ...]:
        """Every untrained base model on a task; measured once a run."""

        def keep(baseline: Baseline) -> None:
            self._run.store.save_evaluation("baseline", baseline.evaluation)
            self._run.emit(BaselineMeasured(baseline, time=self._run.clock()))

        return await self._evaluation.baselines(task, self._parts.runner, keep)

    async def play(self, group: PlannedGroup, index: int, policy: Policy) -> Episode:
        """A new episode under ``policy``."""
        run, task, begin = self._run, group.task, self._run.clock()
        episode_id = f"{group.id}e{index}"
        run.emit(EpisodeStarted(episode_id, task.id, policy.version, time=begin))
        try:
            rollout = await self._converse(episode_id, task, policy)
        except SandboxError as error:
            logger.warning("Episode %s is masked: %s", episode_id, error)
            episode = Episode(episode_id, group.id, task.id, index, "infrastructure", "sandbox", (), (), (), 0, None)
            return self._finish(evolve(episode, seconds=run.clock() - begin))
        episode = self._draft(episode_id, group, index, rollout, run.clock() - begin)
        if rollout.submission is None or rollout.report is None:
            outcome = EpisodeOutcome(task, episode.attempts, None, baselines=await self.baselines(task))
            return self._finish(evolve(episode, reward=self._parts.reward(outcome)))
        job = self._job(episode, task, rollout.submission, rollout.report)
        episode = evolve(episode, job_id=job.id, base_model=job.base_model)
        run.store.save_intent(episode, job, JobHandle(job.id))
        return await self._run_job(episode, task, job)

    async def resume(self, episode: Episode, task: Task) -> Episode:
        """An episode that had submitted its job when the run stopped: find the job again, or run it again."""
        job, handle, result = self._run.store.job(episode.job_id)
        attached = None if result else await self._parts.runner.attach(handle)
        return await self._run_job(episode, task, job, attached)

    async def _converse(self, episode_id: str, task: Task, policy: Policy) -> Rollout:
        parts, settings = self._parts, self._settings
        models, surface = parts.runner.base_models(), parts.runner.config_surface()
        shown = await self.baselines(task) if settings.show_baselines else None

        async def validate(submission: Submission) -> ValidationReport:
            async with self._validating:
                report = await self._validator.validate(submission, task, parts.families[task.family])
            self._run.store.save_submission(submission, report)
            event = SubmissionValidated(episode_id, submission.attempt, report, time=self._run.clock())
            self._run.emit(event)
            return report

        return await play(
            episode_id,
            opening(task, models, shown),
            open_workspace(task, models, shown, surface),
            policy,
            validate,
            parts.sandbox,
            evolve(settings.params, seed=self._seed(episode_id)),
            settings.attempts,
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

    async def _run_job(
        self, episode: Episode, task: Task, job: TrainingJob, handle: JobHandle | None = None
    ) -> Episode:
        run, runner, begin = self._run, self._parts.runner, self._run.clock()
        baselines = await self.baselines(task)
        if handle is None:
            handle = await runner.submit(job)
            run.store.save_handle(handle)
        run.emit(JobStarted(job.id, episode.id, job.base_model, time=run.clock()))
        result = await runner.wait(handle, lambda step, metrics: run.emit(JobProgress(job.id, step, metrics)))
        run.store.save_result(result)
        run.emit(JobFinished(result, time=run.clock()))
        evaluation = None
        if result.status == "succeeded":
            evaluation = await self._evaluation.trained(task, runner, handle, job.base_model)
            run.store.save_evaluation("job", evaluation, job.id)
            run.emit(Evaluated(evaluation, job.id, time=run.clock()))
        await runner.release(handle)
        return self._finish(
            evolve(
                self._paid(episode, task, result, evaluation, baselines), seconds=episode.seconds + run.clock() - begin
            )
        )

    def _paid(
        self,
        episode: Episode,
        task: Task,
        result: JobResult,
        evaluation: Evaluation | None,
        baselines: tuple[Baseline, ...],
    ) -> Episode:
        lost = result.status in ("lost", "cancelled") or (result.failure and result.failure.side == "infrastructure")
        if lost:
            return evolve(episode, status="infrastructure")
        outcome = EpisodeOutcome(
            task,
            episode.attempts,
            episode.valid_attempt,
            episode.reports[-1],
            result,
            evaluation,
            baselines,
            paired_stderr(evaluation, baselines) if evaluation else 0.0,
        )
        return evolve(episode, reward=self._parts.reward(outcome))

    def _finish(self, episode: Episode) -> Episode:
        self._run.store.save_episode(episode, "finished")
        self._run.emit(EpisodeFinished(episode, time=self._run.clock()))
        return episode

    def _seed(self, purpose: str) -> int:
        digest = hashlib.sha256(f"{self._settings.seed}/{purpose}".encode()).digest()
        return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF
