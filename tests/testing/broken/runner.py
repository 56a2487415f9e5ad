"""Runners with one fault each."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import pytest
from attrs import evolve

from ai_trains_ai.errors import JobError
from ai_trains_ai.interfaces import InnerJobRunner, RunContext, ServedModel
from ai_trains_ai.records import (
    BaseModel,
    ConfigKey,
    ConfigRule,
    ConfigSurface,
    JobHandle,
    JobResult,
    Prompt,
    SamplingParams,
    TrainingJob,
)
from ai_trains_ai.testing import InnerJobRunnerContract, TinyRunner

OnEvent = Callable[[int, Mapping[str, float]], None] | None


class Contract(InnerJobRunnerContract):
    """The fixture returns an instance of ``broken``, whose models answer as ``served`` says where that is given."""

    fails: set[str] = set()
    broken: type[TinyRunner] = TinyRunner
    served: type[Answers] | None = None

    @pytest.fixture
    def runner(self) -> InnerJobRunner:
        served = self.served
        if served is None:
            return self.broken()

        class WithServed(self.broken):  # type: ignore[misc, name-defined]
            @contextlib.asynccontextmanager
            async def serve(self, model: BaseModel | JobHandle) -> AsyncIterator[ServedModel]:
                async with super().serve(model) as good:
                    yield served(good)

        return WithServed()


class Answers(ServedModel):
    """What a good model says, spoilt."""

    def __init__(self, good: ServedModel) -> None:
        self.good = good

    async def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[str]:
        return await self.good.sample(prompts, params)


class TestWhole(Contract):
    """What the others break."""


# ------------------------------------------------------------------------------------------ what it offers


class Surface(TinyRunner):
    """Adds ``key`` to the surface."""

    key = ConfigKey("optim.beta1", "float", 0.9, "first moment", low=0.0, high=1.0)

    def config_surface(self) -> ConfigSurface:
        surface = super().config_surface()
        return evolve(surface, keys=(*surface.keys, self.key))


class TestTwoKeysOfOnePath(Contract):
    """It adds to the shared vocabulary what is in there already."""

    fails = {"test_a_key_is_on_the_surface_once"}

    class broken(Surface):
        key = ConfigKey("max_steps", "int", 4, "optimizer steps", low=1, high=64)


class TestDefaultOutOfBounds(Contract):
    """It lowers a bound for small machines and leaves the default."""

    fails = {"test_defaults_keep_their_own_bounds"}

    class broken(Surface):
        key = ConfigKey("context", "int", 8_192, "tokens", low=128, high=4_096)


class TestDefaultsBreakARule(Contract):
    """It has a rule that its own defaults break."""

    fails = {"test_defaults_keep_the_rules"}

    class broken(TinyRunner):
        def config_surface(self) -> ConfigSurface:
            rule = ConfigRule("too-short", lambda config: config["max_steps"] > 100, "too few steps", "take more")
            return evolve(super().config_surface(), rules=(rule,))


class TestSurfaceOfTheMachine(Contract):
    """It narrows the surface once it has seen its machine."""

    fails = {"test_the_surface_stays_the_same"}

    class broken(TinyRunner):
        def config_surface(self) -> ConfigSurface:
            surface = super().config_surface()
            return evolve(surface, keys=surface.keys[: 3 if hasattr(self, "_run") else 4])


class TestModelsOfTheMachine(Contract):
    """It looks up at its start which models fit."""

    fails = {"test_the_base_models_stay_the_same"}

    class broken(TinyRunner):
        def base_models(self) -> Sequence[BaseModel]:
            return super().base_models()[: 1 if hasattr(self, "_run") else 2]


class TestModelsShareAName(Contract):
    """Two revisions of a model have one name."""

    fails = {"test_base_models_have_names_of_their_own"}

    class broken(TinyRunner):
        def base_models(self) -> Sequence[BaseModel]:
            return [evolve(model, name="pico-s", revision=model.name) for model in super().base_models()]


class TestNoModels(Contract):
    """It names base models on request only; the contract's own job is then given."""

    fails = {
        "test_there_is_a_base_model",
        "test_every_prompt_gets_a_reply",
        "test_no_prompts_get_no_replies",
        "test_replies_come_in_the_order_of_their_prompts",
        "test_the_same_seed_gives_the_same_replies",
        "test_text_is_a_conversation_of_one_message",
        "test_a_conversation_is_answered",
    }

    class broken(TinyRunner):
        def base_models(self) -> Sequence[BaseModel]:
            return []

    @pytest.fixture
    def job(self) -> TrainingJob:
        from ai_trains_ai.testing.runner import training_job

        return training_job(TinyRunner())

    @pytest.fixture
    def failing_job(self) -> TrainingJob:
        from ai_trains_ai.testing.runner import training_job

        return training_job(TinyRunner(), "failing", "raise ValueError")


class TestNoRoom(Contract):
    """It counts free slots, and has none before its first machine."""

    fails = {"test_there_is_room_for_a_job"}

    class broken(TinyRunner):
        def capacity(self) -> int:
            return 0


# ------------------------------------------------------------------------------------------ jobs


class TestSubmitRunsTheJob(Contract):
    """It runs the job in submit; nothing can be cancelled then."""

    fails = {
        "test_submit_does_not_wait_for_the_end",
        "test_a_cancelled_job_says_so",
        "test_release_ends_a_running_job",
        "test_close_in_haste_cancels_running_jobs",
    }

    class broken(TinyRunner):
        async def submit(self, job: TrainingJob) -> JobHandle:
            handle = await super().submit(job)
            await asyncio.wait([self._jobs[job.id].task])
            return handle


class TestHandleOfItsOwn(Contract):
    """It hands out the number of the process as the job's id."""

    fails = {"test_a_handle_names_its_job"}

    class broken(TinyRunner):
        async def submit(self, job: TrainingJob) -> JobHandle:
            await super().submit(job)
            process = f"process of {job.id}"
            self._jobs[process] = self._jobs[job.id]
            return JobHandle(process)


class TestKnowsHandlesByIdentity(Contract):
    """It finds jobs by the handle object."""

    fails = {
        "test_a_handle_survives_storage",
        "test_a_result_can_be_waited_for_again",
        "test_an_attached_job_is_the_same",
        "test_cancelling_after_the_end_keeps_the_result",
    }

    class broken(TinyRunner):
        async def submit(self, job: TrainingJob) -> JobHandle:
            self.handles = getattr(self, "handles", [])
            self.handles.append(await super().submit(job))
            return self.handles[-1]

        async def wait(self, handle: JobHandle, on_event: OnEvent = None) -> JobResult:
            if not any(known is handle for known in getattr(self, "handles", [])):
                raise JobError("unknown handle")
            return await super().wait(handle, on_event)


class Results(TinyRunner):
    """Spoils results with `spoil`."""

    def spoil(self, result: JobResult) -> JobResult:
        return result

    async def wait(self, handle: JobHandle, on_event: OnEvent = None) -> JobResult:
        return self.spoil(await super().wait(handle, on_event))


class TestEveryJobIsLost(Contract):
    """It takes every end for a lost connection."""

    fails = {
        "test_a_good_job_succeeds",
        "test_a_result_counts_steps_and_time",
        "test_more_jobs_than_fit_are_queued",
        "test_a_cancelled_wait_leaves_the_job",
        "test_a_failure_of_agent_code_is_a_result",
        "test_a_failed_job_leaves_the_others_alone",
        "test_a_cancelled_job_says_so",
        "test_close_waits_for_running_jobs",
        "test_close_in_haste_cancels_running_jobs",
        "test_a_closed_runner_starts_for_another_run",
    }

    class broken(Results):
        def spoil(self, result: JobResult) -> JobResult:
            return evolve(result, status="lost", steps=0)


class TestResultWithoutName(Contract):
    """It leaves the id out of its results."""

    fails = {
        "test_a_result_names_its_job",
        "test_a_handle_survives_storage",
        "test_equal_bytes_of_two_ids_are_two_jobs",
        "test_more_jobs_than_fit_are_queued",
        "test_an_attached_job_is_the_same",
    }

    class broken(Results):
        def spoil(self, result: JobResult) -> JobResult:
            return evolve(result, job_id="")


class TestTimeRunsBack(Contract):
    """It takes the machine's clock for the end and its own for the beginning."""

    fails = {"test_a_result_counts_steps_and_time"}

    class broken(Results):
        def spoil(self, result: JobResult) -> JobResult:
            return evolve(result, wall_seconds=-3.0)


class TestMetricsAsTheyCome(Contract):
    """It hands on what the job printed of its metrics."""

    fails = {"test_metrics_are_finite_numbers"}

    class broken(Results):
        def spoil(self, result: JobResult) -> JobResult:
            return evolve(result, metrics=({"step": 0.0, "reward": float("inf")},))


class Progress(TinyRunner):
    """Tells listeners of a step with `tell`."""

    def tell(
        self, on_event: Callable[[int, Mapping[str, float]], None], step: int, metrics: Mapping[str, float]
    ) -> None:
        on_event(step, metrics)

    async def wait(self, handle: JobHandle, on_event: OnEvent = None) -> JobResult:
        if on_event is None:
            return await super().wait(handle)
        return await super().wait(handle, lambda step, metrics: self.tell(on_event, step, metrics))


class TestRepeatsProgress(Contract):
    """It reads the whole progress file again at every look."""

    fails = {
        "test_progress_goes_forward",
        "test_submitting_twice_starts_once",
        "test_submitting_at_once_starts_once",
        "test_attaching_starts_nothing",
    }

    class broken(Progress):
        def tell(self, on_event: Any, step: int, metrics: Mapping[str, float]) -> None:
            for before in range(step + 1):
                on_event(before, metrics)


class TestProgressAsItComes(Contract):
    """It hands on what the job printed of its progress."""

    fails = {"test_progress_is_finite_numbers"}

    class broken(Progress):
        def tell(self, on_event: Any, step: int, metrics: Mapping[str, float]) -> None:
            on_event(step, {**metrics, "note": "fine"})


class TestSubmitStartsTwice(Contract):
    """Every submit starts a job."""

    fails = {
        "test_submitting_twice_starts_once",
        "test_submitting_at_once_starts_once",
        "test_submitting_after_the_end_starts_nothing",
    }

    class broken(TinyRunner):
        async def submit(self, job: TrainingJob) -> JobHandle:
            if job.id not in self._jobs:
                return await super().submit(job)
            before = self._jobs.pop(job.id)
            await asyncio.wait([before.task])
            handle = await super().submit(job)
            before.listeners = self._jobs[job.id].listeners
            return handle


class TestLooksBeforeItSubmits(Contract):
    """Between the look for the job and its start it waits for the service."""

    fails = {"test_submitting_at_once_starts_once"}

    class broken(TinyRunner):
        async def submit(self, job: TrainingJob) -> JobHandle:
            if job.id in self._jobs:
                return JobHandle(job.id)
            await asyncio.sleep(0)
            self._jobs.pop(job.id, None)
            return await super().submit(job)


class TestForgetsEndedJobs(Contract):
    """A job that has ended may be submitted anew."""

    fails = {"test_submitting_after_the_end_starts_nothing"}

    class broken(TinyRunner):
        async def submit(self, job: TrainingJob) -> JobHandle:
            if job.id in self._jobs and self._jobs[job.id].task.done():
                del self._jobs[job.id]
            return await super().submit(job)


class TestCachesByContent(Contract):
    """Equal bytes are trained once."""

    fails = {"test_equal_bytes_of_two_ids_are_two_jobs", "test_more_jobs_than_fit_are_queued"}

    class broken(TinyRunner):
        async def submit(self, job: TrainingJob) -> JobHandle:
            for known in self._jobs.values():
                if known.job.content_hash == job.content_hash:
                    return JobHandle(known.job.id)
            return await super().submit(job)


class TestRefusesWhatDoesNotFit(Contract):
    """It has as many places as it says, and no queue."""

    fails = {"test_more_jobs_than_fit_are_queued"}

    class broken(TinyRunner):
        async def submit(self, job: TrainingJob) -> JobHandle:
            if job.id not in self._jobs and len(self._jobs) >= self.capacity():
                raise JobError("no slot is free")
            return await super().submit(job)


class TestOneWaiter(Contract):
    """The result of a job is handed out once."""

    fails = {
        "test_two_waiters_get_one_result",
        "test_a_result_can_be_waited_for_again",
        "test_cancelling_after_the_end_keeps_the_result",
        "test_submitting_twice_starts_once",
        "test_submitting_at_once_starts_once",
        "test_submitting_after_the_end_starts_nothing",
        "test_attaching_starts_nothing",
    }

    class broken(TinyRunner):
        async def wait(self, handle: JobHandle, on_event: OnEvent = None) -> JobResult:
            result = await super().wait(handle, on_event)
            known = self._jobs.get(handle.job_id)
            if known is not None and known in self.told:
                raise JobError("the result was taken")
            if known is not None:
                self.told.append(known)
            return result

        async def start(self, run: RunContext) -> None:
            await super().start(run)
            self.told: list[Any] = []


class TestForgetsResults(Contract):
    """It drops a result once it was told."""

    fails = {
        "test_a_result_can_be_waited_for_again",
        "test_cancelling_after_the_end_keeps_the_result",
        "test_submitting_after_the_end_starts_nothing",
    }

    class broken(TinyRunner):
        async def wait(self, handle: JobHandle, on_event: OnEvent = None) -> JobResult:
            if handle.job_id in self.told:
                raise JobError("the job has ended")
            result = await super().wait(handle, on_event)
            self.told.add(handle.job_id)
            return result

        async def start(self, run: RunContext) -> None:
            await super().start(run)
            self.told: set[str] = set()


class TestWaitIsTheJob(Contract):
    """It awaits the task itself, and a cancelled wait takes the job with it."""

    fails = {"test_a_cancelled_wait_leaves_the_job"}

    class broken(TinyRunner):
        async def wait(self, handle: JobHandle, on_event: OnEvent = None) -> JobResult:
            try:
                return await super().wait(handle, on_event)
            except asyncio.CancelledError:
                self._jobs[handle.job_id].task.cancel()
                raise


class TestListensForEver(Contract):
    """A listener stays when its wait was cancelled."""

    fails = {"test_a_cancelled_wait_is_told_nothing_more"}

    class broken(TinyRunner):
        async def wait(self, handle: JobHandle, on_event: OnEvent = None) -> JobResult:
            if on_event is not None:
                self._known(handle).listeners.append(on_event)
            return await super().wait(handle)


class TestUnknownJobsAreLost(Contract):
    """It says of a job that it never saw that it was lost."""

    fails = {"test_waiting_for_an_unknown_job_is_refused", "test_another_run_knows_no_old_jobs"}

    class broken(TinyRunner):
        async def wait(self, handle: JobHandle, on_event: OnEvent = None) -> JobResult:
            try:
                return await super().wait(handle, on_event)
            except JobError:
                return JobResult(handle.job_id, "lost")


class TestFailureRaises(Contract):
    """It raises what the job raised."""

    fails = {"test_a_failure_of_agent_code_is_a_result", "test_a_failure_is_told_from_its_side"}

    class broken(Results):
        def spoil(self, result: JobResult) -> JobResult:
            if result.failure:
                raise JobError(result.failure.message)
            return result


class TestBlamesItself(Contract):
    """Every non-zero exit is infrastructure."""

    fails = {"test_a_failure_is_told_from_its_side"}

    class broken(Results):
        def spoil(self, result: JobResult) -> JobResult:
            return evolve(result, failure=result.failure and evolve(result.failure, side="infrastructure"))


class TestExplainsNothing(Contract):
    """It keeps the side of a failure and drops its words."""

    fails = {"test_a_failure_is_explained"}

    class broken(Results):
        def spoil(self, result: JobResult) -> JobResult:
            return evolve(result, failure=result.failure and evolve(result.failure, message=""))


class TestOneFailsAllFail(Contract):
    """A failure ends its machine, and the other jobs on it."""

    fails = {"test_a_failed_job_leaves_the_others_alone"}

    class broken(Results):
        def spoil(self, result: JobResult) -> JobResult:
            if result.status == "failed":
                self.down = True
            return evolve(result, status="lost") if getattr(self, "down", False) and not result.failure else result


# ------------------------------------------------------------------------------------------ cancel


class TestCancelRaisesInWait(Contract):
    """A cancelled job cancels who waits for it."""

    fails = {"test_a_cancelled_job_says_so", "test_close_in_haste_cancels_running_jobs"}

    class broken(Results):
        def spoil(self, result: JobResult) -> JobResult:
            if result.status == "cancelled":
                raise JobError("the job was cancelled")
            return result


class TestCancelsOnce(Contract):
    """It ends a process that is gone."""

    fails = {"test_cancelling_twice", "test_cancelling_after_the_end_keeps_the_result"}

    class broken(TinyRunner):
        async def cancel(self, handle: JobHandle) -> None:
            task = self._known(handle).task
            if task.done() or task.cancelling():
                raise JobError("no such process")
            await super().cancel(handle)


class TestCancelRewritesTheEnd(Contract):
    """A cancelled job is cancelled, whatever it was before."""

    fails = {"test_cancelling_after_the_end_keeps_the_result"}

    class broken(TinyRunner):
        async def cancel(self, handle: JobHandle) -> None:
            await super().cancel(handle)
            self.ended = {*getattr(self, "ended", ()), handle.job_id}

        async def wait(self, handle: JobHandle, on_event: OnEvent = None) -> JobResult:
            result = await super().wait(handle, on_event)
            return JobResult(handle.job_id, "cancelled") if handle.job_id in getattr(self, "ended", ()) else result


class TestCancelsAnything(Contract):
    """A job that it doesn't know is as good as cancelled."""

    fails = {"test_cancelling_an_unknown_job_is_refused"}

    class broken(TinyRunner):
        async def cancel(self, handle: JobHandle) -> None:
            with contextlib.suppress(JobError):
                await super().cancel(handle)


# ------------------------------------------------------------------------------------------ serving


class TestServesTheFirstModelAlone(Contract):
    """It has one model in memory."""

    fails = {"test_every_base_model_is_served", "test_several_models_are_served_at_once"}

    class broken(TinyRunner):
        @contextlib.asynccontextmanager
        async def serve(self, model: BaseModel | JobHandle) -> AsyncIterator[ServedModel]:
            if isinstance(model, BaseModel) and model.name != "pico-s":
                raise JobError(f"{model.name} is not loaded")
            async with super().serve(model) as served:
                yield served


class TestAnswersEqualPromptsOnce(Contract):
    """It answers a batch short."""

    fails = {
        "test_every_prompt_gets_a_reply",
        "test_replies_come_in_the_order_of_their_prompts",
        "test_a_conversation_is_answered",
        "test_weights_stay_until_they_are_released",
    }

    class served(Answers):
        async def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[str]:
            return (await self.good.sample(prompts, params))[:1]


class TestNeedsPrompts(Contract):
    """The service refuses an empty batch."""

    fails = {"test_no_prompts_get_no_replies"}

    class served(Answers):
        async def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[str]:
            if not prompts:
                raise ValueError("400: prompts must not be empty")
            return await self.good.sample(prompts, params)


class TestRepliesAsTheyEnd(Contract):
    """It gives replies in the order in which they ended."""

    fails = {"test_replies_come_in_the_order_of_their_prompts"}

    class served(Answers):
        async def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[str]:
            return sorted(await self.good.sample(prompts, params), key=lambda reply: reply[::-1])


class TestDrawsAnew(Contract):
    """It ignores the seed."""

    fails = {
        "test_the_same_seed_gives_the_same_replies",
        "test_text_is_a_conversation_of_one_message",
        "test_several_models_are_served_at_once",
    }

    class served(Answers):
        async def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[str]:
            replies = await self.good.sample(prompts, params)
            return replies if params.temperature == 0 else [f"{reply} {uuid.uuid4()}" for reply in replies]


class TestConversationsGetATemplate(Contract):
    """It applies the chat template to conversations alone."""

    fails = {"test_text_is_a_conversation_of_one_message"}

    class served(Answers):
        async def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[str]:
            raw = [p if isinstance(p, str) else "user: " + "".join(m.content for m in p) for p in prompts]
            return await self.good.sample(raw, params)


class TestTextAlone(Contract):
    """It takes text, as it did before prompts could be conversations."""

    fails = {"test_text_is_a_conversation_of_one_message", "test_a_conversation_is_answered"}

    class served(Answers):
        async def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[str]:
            if not all(isinstance(prompt, str) for prompt in prompts):
                raise TypeError("prompts must be text")
            return await self.good.sample(prompts, params)


class TestOneModelAtATime(Contract):
    """Serving a model swaps the one in memory, for everybody."""

    fails = {"test_several_models_are_served_at_once"}

    class broken(TinyRunner):
        @contextlib.asynccontextmanager
        async def serve(self, model: BaseModel | JobHandle) -> AsyncIterator[ServedModel]:
            async with super().serve(model) as served:
                self.loaded = served
                await asyncio.sleep(0)
                yield self.loaded


class TestServesOnce(Contract):
    """It frees the weights of a job after they were served."""

    fails = {"test_weights_stay_until_they_are_released", "test_several_models_are_served_at_once"}

    class broken(TinyRunner):
        @contextlib.asynccontextmanager
        async def serve(self, model: BaseModel | JobHandle) -> AsyncIterator[ServedModel]:
            async with super().serve(model) as served:
                yield served
            if isinstance(model, JobHandle):
                self._jobs[model.job_id].trained = False


class Fallback(TinyRunner):
    """Serves a base model where `falls_back` says so."""

    def falls_back(self, handle: JobHandle) -> bool:
        return False

    @contextlib.asynccontextmanager
    async def serve(self, model: BaseModel | JobHandle) -> AsyncIterator[ServedModel]:
        if isinstance(model, JobHandle) and self.falls_back(model):
            model = self.base_models()[0]
        async with super().serve(model) as served:
            yield served


class TestServesUnknownJobs(Contract):
    """A job that it doesn't know is served as the base model."""

    fails = {"test_serving_an_unknown_job_is_refused"}

    class broken(Fallback):
        def falls_back(self, handle: JobHandle) -> bool:
            return handle.job_id not in self._jobs and handle.job_id.startswith("never")


class TestServesFailedJobs(Contract):
    """A job that failed is served as the base model that it began with."""

    fails = {"test_serving_a_failed_job_is_refused"}

    class broken(Fallback):
        def falls_back(self, handle: JobHandle) -> bool:
            return handle.job_id in self._jobs and not self._jobs[handle.job_id].trained


# ------------------------------------------------------------------------------------------ release


class TestWeightsSurviveRelease(Contract):
    """Release forgets to forget."""

    fails = {"test_serving_a_released_job_is_refused"}

    class broken(TinyRunner):
        async def release(self, handle: JobHandle, keep_weights: bool = False) -> None:
            known = self._jobs.get(handle.job_id)
            await super().release(handle, keep_weights)
            if known is not None:
                self._jobs[handle.job_id] = known


class TestReleasesOnce(Contract):
    """It deletes files that are gone."""

    fails = {"test_releasing_twice"}

    class broken(TinyRunner):
        async def release(self, handle: JobHandle, keep_weights: bool = False) -> None:
            self.released = getattr(self, "released", [])
            if handle in self.released and handle.job_id not in self._jobs:
                raise JobError("released already")
            self.released.append(handle)
            await super().release(handle, keep_weights)


class TestReleasesWhatItKnows(Contract):
    """It refuses handles that it doesn't know."""

    fails = {"test_releasing_an_unknown_job", "test_releasing_twice"}

    class broken(TinyRunner):
        async def release(self, handle: JobHandle, keep_weights: bool = False) -> None:
            self._known(handle)
            await super().release(handle, keep_weights)


class TestReleaseWaits(Contract):
    """It waits for the end of a job before it lets go."""

    fails = {"test_release_ends_a_running_job"}

    class broken(TinyRunner):
        async def release(self, handle: JobHandle, keep_weights: bool = False) -> None:
            if handle.job_id in self._jobs:
                await asyncio.wait([self._jobs[handle.job_id].task])
            await super().release(handle, keep_weights)


class TestKeepsNoWeights(Contract):
    """It takes no notice of keep_weights."""

    fails = {"test_kept_weights_are_in_the_run_folder", "test_a_closed_runner_starts_for_another_run"}

    class broken(TinyRunner):
        async def release(self, handle: JobHandle, keep_weights: bool = False) -> None:
            await super().release(handle)


class TestKeepsAllWeights(Contract):
    """It keeps the weights of every job."""

    fails = {"test_weights_are_not_kept_unasked"}

    class broken(TinyRunner):
        async def release(self, handle: JobHandle, keep_weights: bool = False) -> None:
            await super().release(handle, keep_weights=True)


# ------------------------------------------------------------------------------------------ attach


class TestAttachMakesUpAHandle(Contract):
    """It gives back what it was given."""

    fails = {"test_a_job_that_is_gone_is_not_attached"}

    class broken(TinyRunner):
        async def attach(self, handle: JobHandle) -> JobHandle | None:
            return handle


class TestAttachesToAnother(Contract):
    """It attaches to the newest job of the machine."""

    fails = {"test_an_attached_job_is_the_same"}

    class broken(TinyRunner):
        async def attach(self, handle: JobHandle) -> JobHandle | None:
            if handle.job_id not in self._jobs:
                return None
            job = self._jobs[handle.job_id].job
            return await self.submit(evolve(job, id="newest"))


class TestAttachRestarts(Contract):
    """It starts a job again to attach to it."""

    fails = {"test_attaching_starts_nothing"}

    class broken(TinyRunner):
        async def attach(self, handle: JobHandle) -> JobHandle | None:
            if handle.job_id not in self._jobs:
                return None
            before = self._jobs.pop(handle.job_id)
            await asyncio.wait([before.task])
            return await self.submit(before.job)


# ------------------------------------------------------------------------------------------ the end


class TestNeverDrains(Contract):
    """Close ends everything at once."""

    fails = {"test_close_waits_for_running_jobs"}

    class broken(TinyRunner):
        async def close(self, drain: bool = True) -> None:
            await super().close(drain=False)


class TestAlwaysDrains(Contract):
    """Close waits for everything."""

    fails = {"test_close_in_haste_cancels_running_jobs"}

    class broken(TinyRunner):
        async def close(self, drain: bool = True) -> None:
            await super().close()


class TestClosesOnce(Contract):
    """It stops a server that is gone; a runner that never started has none."""

    fails = {"test_closing_twice", "test_closing_without_a_start"}

    class broken(TinyRunner):
        up = 0

        async def start(self, run: RunContext) -> None:
            await super().start(run)
            self.up = 1

        async def close(self, drain: bool = True) -> None:
            await super().close(drain)
            if not self.up and drain:
                raise JobError("no server")
            self.up = 0


class TestStartsOnce(Contract):
    """It keeps the folder of its first run."""

    fails = {"test_a_closed_runner_starts_for_another_run"}

    class broken(TinyRunner):
        async def start(self, run: RunContext) -> None:
            first = getattr(self, "_run", run)
            await super().start(run)
            self._run = evolve(run, folder=first.folder)


class TestKeepsOldJobs(Contract):
    """It keeps the jobs of an earlier run."""

    fails = {"test_another_run_knows_no_old_jobs"}

    class broken(TinyRunner):
        async def start(self, run: RunContext) -> None:
            jobs = self._jobs
            await super().start(run)
            self._jobs = jobs
