"""The scheduler: groups are sampled, validated, run and trained on as a pipeline with bounded staleness."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import islice

from attrs import evolve

from ai_trains_ai.errors import BudgetExceeded, ConfigurationError, PolicyError, RunInterrupted, SandboxError
from ai_trains_ai.evaluation import HiddenEvaluation
from ai_trains_ai.events import (
    CheckpointSaved,
    HealthWarning,
    ProbeFinished,
    RunFinished,
    RunStarted,
    RunStopped,
    StepFinished,
    StepStarted,
)
from ai_trains_ai.interfaces import OuterTrainer, Policy, RunContext
from ai_trains_ai.loop.episodes import Episodes
from ai_trains_ai.loop.groups import PlannedGroup, enough, planned, probe, with_advantages
from ai_trains_ai.loop.health import Health
from ai_trains_ai.loop.metrics import episode_metrics, step_metrics
from ai_trains_ai.loop.settings import LoopSettings, Parts
from ai_trains_ai.loop.watchdog import Watchdog
from ai_trains_ai.records import Checkpoint, Episode, EpisodeGroup, TrainStep
from ai_trains_ai.report.run import Run
from ai_trains_ai.validation import Validator

logger = logging.getLogger(__name__)

StartedStep = tuple[int, list[asyncio.Task[tuple[PlannedGroup, list[Episode]]]]]


class OuterLoop:
    """Runs the outer loop of one run folder, from where it stands to ``steps``.

    A group of step *s* may start once *s − max_staleness* updates are done, and while fewer groups than one step needs
    (one more when the loop is asynchronous) are unfinished: the loop paces itself and discards nothing. A step trains
    on its own groups in the planned order, so that groups with short jobs weigh no more than others.
    """

    def __init__(
        self,
        parts: Parts,
        settings: LoopSettings,
        run: RunContext,
        make_validator: Callable[[], Validator],
        evaluation: HiddenEvaluation,
    ) -> None:
        self._watchdog = Watchdog(run.clock, run.emit, settings.stall_seconds)
        self._parts, self._settings, self._run = parts, settings, evolve(run, emit=self._watchdog.emit)
        self._health = Health(settings.health)
        self._probing: asyncio.Task[dict[str, float]] | None = None
        self._make_validator, self._evaluation = make_validator, evaluation
        evaluation.restore(run.store.baselines())
        self._trained = len(run.store.steps())
        self._unfinished = 0
        self._moved = asyncio.Condition()
        self._stopping = False
        # what infrastructure broke in a step that never trained is played anew
        finished = [e for e in run.store.episodes(stage="finished") if e.status == "finished"]
        self._finished = _by_group(finished)
        self._submitted = _by_group(run.store.episodes(stage="submitted"))

    def stop(self) -> None:
        """Drain: start nothing new, let episodes in flight end. The run then raises `RunInterrupted`."""
        self._stopping = True
        self._wake = asyncio.ensure_future(self._notify())

    async def run(self, steps: int) -> None:
        """Train until ``steps`` updates are done. Raises `RunInterrupted` after `stop`."""
        self._steps = steps
        async with self._running():
            await self._probe("probe-before", 0)
            await self._train(steps)
            await self._probe("probe-after", self._trained)
            self._select_checkpoint()

    async def evaluate(self, episodes: int) -> None:
        """Play so many episodes on every task, held-out ones too, and train nothing. Raises as `run` does."""
        async with self._running():
            tasks = [*self._parts.tasks, *self._parts.held_out]
            await self._played("evaluation", 0, probe("evaluation", 0, tasks, episodes))
            self._check_stop()
            played = self._run.store.probe("evaluation")
            if all(episode.status == "infrastructure" for episode in played):
                raise _broken(played, "the evaluation", f"all {len(played)}")

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """Every part started; inside, errors end the run, and the end is told."""
        begin = self._run.clock()
        try:
            async with self._started():
                yield
        except BaseException as error:
            cause = _cause(error)
            with contextlib.suppress(BudgetExceeded):  # it is stopping already
                reason = f"{type(cause).__name__}: {cause}"
                self._run.emit(RunStopped(self._trained, reason, time=self._run.clock()))
            if cause is error:
                raise
            raise cause from error
        self._run.emit(RunFinished(self._trained, self._run.clock() - begin, time=self._run.clock()))

    def _select_checkpoint(self) -> None:
        candidates = [checkpoint for checkpoint in self._run.store.checkpoints() if checkpoint.path]
        if candidates:
            chosen, rule = self._parts.hooks.select_checkpoint(Run(self._run.folder), candidates)
            self._run.store.set_meta(checkpoint={"name": chosen.name, "rule": rule})

    @contextlib.asynccontextmanager
    async def _started(self) -> AsyncIterator[None]:
        """Every part started, and closed again in reverse order whatever happens in between."""
        parts, run = self._parts, self._run
        checkpoints = [checkpoint for checkpoint in run.store.checkpoints() if checkpoint.path]
        resumed = bool(self._trained or self._finished)
        failed = True
        async with contextlib.AsyncExitStack() as stack:
            watching = asyncio.create_task(self._watchdog.run())
            stack.callback(watching.cancel)
            stack.push_async_callback(parts.sandbox.close)
            await parts.sandbox.start()
            stack.push_async_callback(parts.outer.close)
            stack.push_async_callback(lambda: parts.runner.close(drain=not failed))
            await parts.runner.start(run)
            await parts.outer.start(run, checkpoints[-1] if checkpoints else None)
            validator = self._make_validator()
            self._episodes = Episodes(parts, self._settings, run, validator, self._evaluation, self._watchdog)
            names, isolation = tuple(parts.hooks.labels), parts.sandbox.guarantees.text()
            folder = str(run.folder)
            run.emit(RunStarted(run.folder.name, isolation, resumed, names, folder, time=run.clock()))
            yield
            failed = False

    # ------------------------------------------------------------------------------------------ groups

    async def _play_group(self, plan: PlannedGroup) -> tuple[PlannedGroup, list[Episode]]:
        """All episodes of a group, at once; those that an earlier session finished are taken from the store."""
        self._run.store.save_group(plan.id, plan.phase, plan.step, plan.position, plan.task.id)
        finished, submitted = self._finished.pop(plan.id, {}), self._submitted.pop(plan.id, {})
        policy = await self._parts.outer.snapshot()
        if not isinstance(policy, Policy):
            name = type(self._parts.outer).__name__
            raise ConfigurationError(f"{name}.snapshot() gave {policy!r}. It must give an ai_trains_ai.Policy.")

        async def one(index: int) -> Episode:
            if index in finished:
                return finished[index]
            if index in submitted:
                return await self._episodes.resume(submitted[index], plan.task)
            return await self._episodes.play(plan, index, policy)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index)) for index in range(plan.size)]
        return plan, [task.result() for task in tasks]

    async def _probe(self, phase: str, step: int) -> dict[str, float]:
        """Held-out tasks under the policy as it is; never trained on."""
        if phase == "probe-before" and self._trained:
            return {}
        plans = (
            probe(phase, step, self._parts.held_out, self._settings.probe_episodes)
            if self._settings.probe_episodes
            else ()
        )
        return await self._played(phase, step, plans) if plans else {}

    async def _played(self, phase: str, step: int, plans: Sequence[PlannedGroup]) -> dict[str, float]:
        """What the episodes of untrained groups come to."""
        self._check_stop()
        async with asyncio.TaskGroup() as group:
            played = [group.create_task(self._play_group(plan)) for plan in plans]
        episodes = [episode for task in played for episode in task.result()[1]]
        metrics = episode_metrics(episodes, "held_out")
        self._run.store.set_meta(**{_probe_name(phase, step): metrics})
        self._run.emit(ProbeFinished(step, metrics, time=self._run.clock()))
        return metrics

    def _probe_when_due(self, group: asyncio.TaskGroup) -> None:
        """Play the held-out tasks beside the next step's episodes, from the version of now."""
        step, every = self._trained, self._settings.probe_every
        if not every or not step or step % every or step == self._steps or self._stopping:
            return

        async def play() -> dict[str, float]:
            found = self._run.store.meta(_probe_name("probe", step))
            return {**(found or await self._probe("probe", step)), "held_out/step": float(step)}

        self._probing = group.create_task(play())

    async def _probed(self) -> dict[str, float]:
        """What the probe since the last update found.

        The next update waits for it, or a run that is killed in between could not play the rest from the same version.
        """
        probing, self._probing = self._probing, None
        return await probing if probing else {}

    # ------------------------------------------------------------------------------------------ training

    async def _train(self, steps: int) -> None:
        started: asyncio.Queue[StartedStep | None] = asyncio.Queue()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._produce(steps, started, group))
            group.create_task(self._consume(started, group))
            self._probe_when_due(group)
        if self._trained < steps:
            self._check_stop()

    async def _produce(self, steps: int, started: asyncio.Queue[StartedStep | None], group: asyncio.TaskGroup) -> None:
        """Start groups in order, as staleness and pacing allow."""
        settings = self._settings
        for plans in islice(
            planned(self._parts.tasks, settings.groups_per_step, settings.group_size, settings.seed),
            self._trained,
            steps,
        ):
            tasks = []
            for plan in plans:
                if not await self._may_start(plan.step):
                    await started.put(None)
                    return
                tasks.append(group.create_task(self._counted(plan)))
            await started.put((plans[0].step, tasks))
        await started.put(None)

    async def _may_start(self, step: int) -> bool:
        ahead = self._settings.groups_per_step + (self._settings.max_staleness > 0)

        def allowed() -> bool:
            return self._stopping or (step - self._trained <= self._settings.max_staleness and self._unfinished < ahead)

        async with self._moved:
            await self._moved.wait_for(allowed)
            self._unfinished += not self._stopping
        return not self._stopping

    async def _counted(self, plan: PlannedGroup) -> tuple[PlannedGroup, list[Episode]]:
        played = await self._play_group(plan)
        self._unfinished -= 1
        await self._notify()
        return played

    async def _consume(self, started: asyncio.Queue[StartedStep | None], group: asyncio.TaskGroup) -> None:
        """Train on each step's groups when all of them are complete."""
        begin = self._run.clock()
        while (item := await started.get()) is not None:
            step, tasks = item
            self._run.emit(StepStarted(step, time=self._run.clock()))
            played = await asyncio.gather(*tasks)
            settings = self._settings
            groups = [
                with_advantages(plan, episodes, normalize_std=settings.normalize_std, min_share=settings.min_share)
                for plan, episodes in played
            ]
            self._check_infrastructure(step, groups)
            probed = await self._probed()
            version = (await self._parts.outer.snapshot()).version
            train, checkpoint = await self._update(step, groups, version)
            now = self._run.clock()
            results = {result.job_id: result for result in self._run.store.results()}
            metrics = step_metrics(groups, train, version, results, now - begin) | probed
            metrics |= self._health.derived(metrics)
            self._run.store.save_step(step, train, checkpoint, now - begin, metrics)
            begin = now
            self._trained = step + 1
            self._run.emit(CheckpointSaved(checkpoint, time=now))
            self._run.emit(StepFinished(step, train, metrics, time=now))
            for tracker in self._parts.trackers:
                tracker.log(step, metrics)
            for text in self._health.check(step, metrics):
                logger.warning(text)
                self._run.emit(HealthWarning(step, text, time=self._run.clock()))
            self._probe_when_due(group)
            await self._notify()

    async def _update(self, step: int, groups: Sequence[EpisodeGroup], version: int) -> tuple[TrainStep, Checkpoint]:
        outer = self._parts.outer
        if not isinstance(outer, OuterTrainer):
            return TrainStep(version, {}), Checkpoint(f"step-{step:04d}", "", version)
        try:
            with self._watchdog.waiting("the update of the outer policy", f"step {step}"):
                train = await outer.train_step(groups)
        except PolicyError as error:
            # the policy is unchanged; trying the same batch again would fail again
            logger.warning("Step %d teaches nothing: %s", step, error)
            train = TrainStep(version, {"outer/skipped": 1.0})
        with self._watchdog.waiting("the outer checkpoint", f"step {step}"):
            return train, await outer.save(f"step-{step:04d}")

    def _check_infrastructure(self, step: int, groups: Sequence[EpisodeGroup]) -> None:
        """Masking single episodes is fine; going on when no group can train would only burn money."""
        if any(enough(group.episodes, self._settings.min_share) for group in groups):
            return
        masked = [e for group in groups for e in group.episodes if e.status == "infrastructure"]
        raise _broken(masked, f"step {step}", f"{len(masked)}", ", in every group too many to train on")

    async def _notify(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    def _check_stop(self) -> None:
        if self._stopping:
            raise RunInterrupted(
                f"Stopped after {self._trained} steps; everything finished is kept. "
                f"Go on with: ai-trains-ai resume {self._run.folder}"
            )


def _broken(masked: Sequence[Episode], what: str, count: str, more: str = "") -> SandboxError:
    return SandboxError(
        f"{count} episodes of {what} failed for reasons of infrastructure{more}; the last: {masked[-1].note} "
        f"Mend that and resume the run: {what} is then played anew."
    )


def _cause(error: BaseException) -> BaseException:
    """The first real error in a group: the parts of a run are tasks, but its user called one function."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _probe_name(phase: str, step: int) -> str:
    """What a probe's metrics are kept under; of those in between there are several."""
    return f"{phase}-{step:04d}" if phase == "probe" else phase


def _by_group(episodes: Sequence[Episode]) -> dict[str, dict[int, Episode]]:
    found: dict[str, dict[int, Episode]] = {}
    for episode in episodes:
        found.setdefault(episode.group_id, {})[episode.index] = episode
    return found
