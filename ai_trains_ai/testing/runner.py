"""What every runner of training jobs promises."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from attrs import evolve

from ai_trains_ai.convert import from_json, to_json
from ai_trains_ai.errors import JobError
from ai_trains_ai.families.practice import practice
from ai_trains_ai.interfaces import InnerJobRunner, RunContext, Sandbox
from ai_trains_ai.records import (
    BaseModel,
    ConfigKey,
    JobHandle,
    JobResult,
    Message,
    Prompt,
    SamplingParams,
    TaskLimits,
    TrainingJob,
    content_hash,
)
from ai_trains_ai.testing.expect import no_error, raises
from ai_trains_ai.testing.fakes import environment, run_context

HANG = 600.0  # seconds after which something that should be over counts as hung
PROMPTS = ("start 1 add 2 ->", "start 3 times 2 add 1 ->", "start 9 minus 4 ->", "start 7 add 5 times 3 minus 2 ->")
SAMPLED = SamplingParams(temperature=1.0, max_tokens=12, seed=3)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
UNKNOWN = JobHandle("never-submitted")

Steps = list[int]


def training_job(runner: InnerJobRunner, job_id: str = "job", source: str | None = None) -> TrainingJob:
    """A small valid job: the runner's first base model and defaults, two steps where its surface allows them."""
    surface, source = runner.config_surface(), source or environment()
    config = surface.defaults()
    for path, value in (("max_steps", 2), ("batch_size", 2 * config.get("group_size", 8)), ("optim.lr", 1e-3)):
        key = surface.key(path)
        tried = {**config, path: value}
        if key is not None and not _outside(key, value) and all(rule.holds(tried) for rule in surface.rules):
            config = tried
    rows = tuple(json.dumps(row) for row in practice("chained-arithmetic", 2, 3, 32))
    files = {"environment.py": source.encode(), "job.toml": b""}
    model = runner.base_models()[0].name
    return TrainingJob(
        job_id, "episode", "task", model, files, config, {}, rows, 7, TaskLimits(), content_hash(files)
    )  # fmt: skip


class InnerJobRunnerContract:
    """Subclass it and give your runner, not started.

    >>> class TestMyRunner(InnerJobRunnerContract):
    ...     @pytest.fixture
    ...     def runner(self):
    ...         return MyRunner(provider=FakeGPUProvider())

    Runs about thirty of your smallest jobs, so give it a stand-in of what is slow or paid. Override, where the default
    doesn't suit:

    * ``sandbox``: the one that the run lends, with your ``sandbox_preload`` done; by default there is none.
    * ``job``: a `TrainingJob` that succeeds.
    * ``failing_job``: one that fails by the agent's side; by default its environment.py raises.
    """

    @pytest.fixture
    def runner(self) -> InnerJobRunner:
        raise NotImplementedError("override the fixture 'runner' and return your InnerJobRunner, not started")

    @pytest.fixture
    def sandbox(self) -> Sandbox | None:
        """What the run lends; ``None`` is one that refuses to work."""
        return None

    @pytest.fixture
    def job(self, runner: InnerJobRunner) -> TrainingJob:
        return training_job(runner)

    @pytest.fixture
    def failing_job(self, runner: InnerJobRunner) -> TrainingJob:
        source = environment() + '\nraise ValueError("broken on purpose")\n'
        return training_job(runner, "failing", source)

    @pytest.fixture
    def run(self, tmp_path: Path, sandbox: Sandbox | None) -> Iterator[RunContext]:
        """What a run lends to the runner."""
        with run_context(tmp_path / "run", sandbox=sandbox) as run:
            yield run

    @pytest.fixture
    def another_run(self, tmp_path: Path, sandbox: Sandbox | None) -> Iterator[RunContext]:
        """What a second run lends; ask for it before ``started``, so that it outlives the runner."""
        with run_context(tmp_path / "another", sandbox=sandbox) as run:
            yield run

    @pytest_asyncio.fixture
    async def started(self, runner: InnerJobRunner, run: RunContext) -> AsyncIterator[InnerJobRunner]:
        """The runner, started, and closed afterwards."""
        await run.sandbox.start()
        await runner.start(run)
        yield runner
        await runner.close(drain=False)

    # -------------------------------------------------------------------------------------- what it offers

    def test_a_key_is_on_the_surface_once(self, runner: InnerJobRunner) -> None:
        paths = [key.path for key in runner.config_surface().keys]
        assert len(set(paths)) == len(paths), "two keys of config_surface() share a path"

    def test_defaults_keep_their_own_bounds(self, runner: InnerJobRunner) -> None:
        wrong = {key.path: why for key in runner.config_surface().keys if (why := _outside(key, key.default))}
        assert not wrong, "a default of config_surface() is not what its own key allows"

    def test_defaults_keep_the_rules(self, runner: InnerJobRunner) -> None:
        surface = runner.config_surface()
        broken = [rule.code for rule in surface.rules if not rule.holds(surface.defaults())]
        assert not broken, "an agent that sets nothing breaks these rules of config_surface()"

    @pytest.mark.asyncio
    async def test_the_surface_stays_the_same(self, runner: InnerJobRunner, run: RunContext) -> None:
        before = runner.config_surface().keys
        await run.sandbox.start()
        await runner.start(run)
        after = runner.config_surface().keys
        await runner.close(drain=False)
        assert after == before, "config_surface() is the same for a whole run, from before its start on"

    def test_there_is_a_base_model(self, runner: InnerJobRunner) -> None:
        assert runner.base_models(), "base_models() names at least one"

    def test_base_models_have_names_of_their_own(self, runner: InnerJobRunner) -> None:
        names = [model.name for model in runner.base_models()]
        assert len(set(names)) == len(names), "a job names its base model: two share a name"

    @pytest.mark.asyncio
    async def test_the_base_models_stay_the_same(self, runner: InnerJobRunner, run: RunContext) -> None:
        before = list(runner.base_models())
        await run.sandbox.start()
        await runner.start(run)
        after = list(runner.base_models())
        await runner.close(drain=False)
        assert after == before, "base_models() are the same for a whole run, from before its start on"

    @pytest.mark.asyncio
    async def test_there_is_room_for_a_job(self, started: InnerJobRunner) -> None:
        assert started.capacity() >= 1, "capacity() is at least 1 after start()"

    # -------------------------------------------------------------------------------------- jobs

    @pytest.mark.asyncio
    async def test_submit_does_not_wait_for_the_end(self, started: InnerJobRunner, job: TrainingJob) -> None:
        handle = await started.submit(job)
        waiting = asyncio.create_task(started.wait(handle))
        for _ in range(5):
            await asyncio.sleep(0)
        over = waiting.done()
        await started.cancel(handle)
        await _in_time(asyncio.gather(waiting, return_exceptions=True))
        assert not over, "submit() starts or queues the job and returns at once; this one was over already"

    @pytest.mark.asyncio
    async def test_a_handle_names_its_job(self, started: InnerJobRunner, job: TrainingJob) -> None:
        handle = await started.submit(job)
        assert handle.job_id == job.id, "JobHandle.job_id is the id of the job"

    @pytest.mark.asyncio
    async def test_a_handle_survives_storage(self, started: InnerJobRunner, job: TrainingJob) -> None:
        handle = await started.submit(job)
        stored = from_json(to_json(handle), JobHandle)
        result = await _in_time(started.wait(stored))
        assert result.job_id == job.id, "a handle that was read back from the run's store finds its job"

    @pytest.mark.asyncio
    async def test_a_good_job_succeeds(self, started: InnerJobRunner, job: TrainingJob) -> None:
        result = await _finished(started, job)
        assert (result.status, result.failure) == ("succeeded", None), "the contract's job should succeed; override it"

    @pytest.mark.asyncio
    async def test_a_result_names_its_job(self, started: InnerJobRunner, job: TrainingJob) -> None:
        assert (await _finished(started, job)).job_id == job.id, "JobResult.job_id is the id of the job"

    @pytest.mark.asyncio
    async def test_a_result_counts_steps_and_time(self, started: InnerJobRunner, job: TrainingJob) -> None:
        result = await _finished(started, job)
        spent = (result.train_seconds, result.wall_seconds, result.cost_usd)
        assert result.steps >= 1, "JobResult.steps of a job that succeeded is at least 1"
        assert all(math.isfinite(number) and number >= 0 for number in spent), "seconds and cost are finite, never < 0"

    @pytest.mark.asyncio
    async def test_metrics_are_finite_numbers(self, started: InnerJobRunner, job: TrainingJob) -> None:
        metrics = (await _finished(started, job)).metrics
        odd = [step for step in metrics if not _finite(step)]
        assert not odd, "JobResult.metrics are one mapping of finite numbers for each step"

    @pytest.mark.asyncio
    async def test_progress_goes_forward(self, started: InnerJobRunner, job: TrainingJob) -> None:
        seen: Steps = []
        await _in_time(started.wait(await started.submit(job), lambda step, metrics: seen.append(step)))
        assert seen == sorted(set(seen)), "on_event(step, metrics) tells a waiter of each step once, in order"

    @pytest.mark.asyncio
    async def test_progress_is_finite_numbers(self, started: InnerJobRunner, job: TrainingJob) -> None:
        seen: list[Mapping[str, float]] = []
        await _in_time(started.wait(await started.submit(job), lambda step, metrics: seen.append(metrics)))
        odd = [metrics for metrics in seen if not _finite(metrics)]
        assert not odd, "on_event(step, metrics) gets finite numbers: what a job says of itself is untrusted"

    @pytest.mark.asyncio
    async def test_submitting_twice_starts_once(
        self, started: InnerJobRunner, job: TrainingJob, run: RunContext
    ) -> None:
        first = await started.submit(job)
        second = await started.submit(job)
        await self._ran_once(started, run, first, second)

    @pytest.mark.asyncio
    async def test_submitting_at_once_starts_once(
        self, started: InnerJobRunner, job: TrainingJob, run: RunContext
    ) -> None:
        first, second = await asyncio.gather(started.submit(job), started.submit(job))
        await self._ran_once(started, run, first, second)

    @pytest.mark.asyncio
    async def test_submitting_after_the_end_starts_nothing(
        self, started: InnerJobRunner, job: TrainingJob, run: RunContext
    ) -> None:
        await _finished(started, job)
        again = await started.submit(job)
        await self._ran_once(started, run, again, again)

    async def _ran_once(self, runner: InnerJobRunner, run: RunContext, first: JobHandle, second: JobHandle) -> None:
        steps: tuple[Steps, Steps] = ([], [])
        results = await _in_time(
            asyncio.gather(
                runner.wait(first, lambda step, metrics: steps[0].append(step)),
                runner.wait(second, lambda step, metrics: steps[1].append(step)),
            )
        )
        repeated = [seen for seen in steps if len(set(seen)) < len(seen)]
        leases = [
            charge for _, charge in run.store.charges() if (charge.kind, charge.subject) == ("busy", first.job_id)
        ]
        assert results[0] == results[1], (
            "submit() is idempotent by job.id: both handles are of one job, with one result"
        )
        assert not repeated, "submit() is idempotent by job.id: some steps were trained twice"
        assert len(leases) <= 1, "submit() is idempotent by job.id: the job was charged twice"

    @pytest.mark.asyncio
    async def test_equal_bytes_of_two_ids_are_two_jobs(self, started: InnerJobRunner, job: TrainingJob) -> None:
        other = evolve(job, id="twin")
        results = await asyncio.gather(_finished(started, job), _finished(started, other))
        ids = [result.job_id for result in results]
        assert ids == [job.id, "twin"], "a job is known by its id, not by its content hash"

    @pytest.mark.asyncio
    async def test_more_jobs_than_fit_are_queued(self, started: InnerJobRunner, job: TrainingJob) -> None:
        jobs = [evolve(job, id=f"job-{number}") for number in range(started.capacity() + 1)]
        handles = [await _in_time(started.submit(one)) for one in jobs]

        async def result(handle: JobHandle) -> JobResult:
            found = await _in_time(started.wait(handle))
            await _in_time(started.release(handle))  # until then a job may keep its machine
            return found

        results = await asyncio.gather(*map(result, handles))
        statuses = {result.job_id: result.status for result in results}
        expected = {one.id: "succeeded" for one in jobs}
        assert statuses == expected, "submit() queues what doesn't fit: capacity() is a hint to the loop, no limit"

    @pytest.mark.asyncio
    async def test_two_waiters_get_one_result(self, started: InnerJobRunner, job: TrainingJob) -> None:
        handle = await started.submit(job)
        first, second = await _in_time(asyncio.gather(started.wait(handle), started.wait(handle)))
        assert first == second, "several callers may wait for one job; each gets its result"

    @pytest.mark.asyncio
    async def test_a_result_can_be_waited_for_again(self, started: InnerJobRunner, job: TrainingJob) -> None:
        first = await _finished(started, job)
        with no_error("wait() of a job that has ended gives its result until release()"):
            assert await _in_time(started.wait(JobHandle(job.id))) == first

    @pytest.mark.asyncio
    async def test_a_cancelled_wait_leaves_the_job(self, started: InnerJobRunner, job: TrainingJob) -> None:
        handle = await started.submit(job)
        waiting = asyncio.create_task(started.wait(handle))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        result = await _in_time(started.wait(handle))
        assert result.status == "succeeded", "cancelling a wait() leaves the job alone; only cancel() ends it"

    @pytest.mark.asyncio
    async def test_a_cancelled_wait_is_told_nothing_more(self, started: InnerJobRunner, job: TrainingJob) -> None:
        seen: Steps = []
        handle = await started.submit(job)
        waiting = asyncio.create_task(started.wait(handle, lambda step, metrics: seen.append(step)))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        before = len(seen)
        await _in_time(started.wait(handle))
        assert len(seen) == before, "on_event of a wait() that was cancelled is not called any more"

    @pytest.mark.asyncio
    async def test_waiting_for_an_unknown_job_is_refused(self, started: InnerJobRunner) -> None:
        with raises(JobError, "wait() raises JobError for a handle that this runner doesn't know"):
            await _in_time(started.wait(UNKNOWN))

    @pytest.mark.asyncio
    async def test_a_failure_of_agent_code_is_a_result(self, started: InnerJobRunner, failing_job: TrainingJob) -> None:
        with no_error("a job's own failure is a result, not an exception"):
            result = await _finished(started, failing_job)
        assert result.status == "failed", "the contract's failing job should fail; override it where it doesn't"

    @pytest.mark.asyncio
    async def test_a_failure_is_told_from_its_side(self, started: InnerJobRunner, failing_job: TrainingJob) -> None:
        failure = await _failure(started, failing_job)
        assert failure is not None, "a failed job has a JobFailure"
        assert failure.side == "agent", (
            "agent code that raises is the agent's failure: infrastructure masks the episode"
        )

    @pytest.mark.asyncio
    async def test_a_failure_is_explained(self, started: InnerJobRunner, failing_job: TrainingJob) -> None:
        failure = await _failure(started, failing_job)
        assert failure is None or (failure.code and failure.message), "JobFailure has a stable code and a message"

    @pytest.mark.asyncio
    async def test_a_failed_job_leaves_the_others_alone(
        self, started: InnerJobRunner, job: TrainingJob, failing_job: TrainingJob
    ) -> None:
        together = asyncio.gather(_finished(started, failing_job), _finished(started, job), return_exceptions=True)
        result = (await together)[1]
        assert isinstance(result, JobResult), f"a failing job took another with it: {result!r}"
        assert result.status == "succeeded", f"a failing job took another with it: {result.failure}"

    # -------------------------------------------------------------------------------------- cancel

    @pytest.mark.asyncio
    async def test_a_cancelled_job_says_so(self, started: InnerJobRunner, job: TrainingJob) -> None:
        handle = await started.submit(job)
        waiting = asyncio.create_task(started.wait(handle))
        await asyncio.sleep(0)
        await started.cancel(handle)
        with no_error("wait() of a cancelled job returns; it doesn't raise"):
            result = await _in_time(asyncio.shield(waiting))
        assert result.status == "cancelled", "after cancel(), wait() gives status 'cancelled'"

    @pytest.mark.asyncio
    async def test_cancelling_twice(self, started: InnerJobRunner, job: TrainingJob) -> None:
        handle = await started.submit(job)
        await started.cancel(handle)
        with no_error("cancel() is idempotent"):
            await started.cancel(handle)

    @pytest.mark.asyncio
    async def test_cancelling_after_the_end_keeps_the_result(self, started: InnerJobRunner, job: TrainingJob) -> None:
        before = await _finished(started, job)
        handle = JobHandle(job.id)
        with no_error("cancel() of a job that has ended does nothing"):
            await started.cancel(handle)
        after = await _in_time(started.wait(handle))
        assert after == before, "a job that has ended keeps its result, whoever cancels it"

    @pytest.mark.asyncio
    async def test_cancelling_an_unknown_job_is_refused(self, started: InnerJobRunner) -> None:
        with raises(JobError, "cancel() raises JobError for a handle that this runner doesn't know"):
            await started.cancel(UNKNOWN)

    # -------------------------------------------------------------------------------------- serving

    @pytest.mark.asyncio
    async def test_every_base_model_is_served(self, started: InnerJobRunner) -> None:
        for model in started.base_models():
            with no_error(f"serve() takes every model of base_models(), and {model.name} is one"):
                await _replies(started, model, PROMPTS[0])

    @pytest.mark.asyncio
    async def test_every_prompt_gets_a_reply(self, started: InnerJobRunner) -> None:
        replies = await _replies(started, started.base_models()[0], *PROMPTS)
        assert len(replies) == len(PROMPTS), "sample() gives one reply per prompt, equal ones too"
        assert all(isinstance(reply, str) for reply in replies), "a reply is text"

    @pytest.mark.asyncio
    async def test_no_prompts_get_no_replies(self, started: InnerJobRunner) -> None:
        with no_error("sample() gives one reply per prompt; none for none"):
            replies = await _replies(started, started.base_models()[0])
        assert list(replies) == [], "sample() gives one reply per prompt; none for none"

    @pytest.mark.asyncio
    async def test_replies_come_in_the_order_of_their_prompts(self, started: InnerJobRunner) -> None:
        model = started.base_models()[0]
        together = await _replies(started, model, *PROMPTS, params=GREEDY)
        alone = [reply for prompt in PROMPTS for reply in await _replies(started, model, prompt, params=GREEDY)]
        assert together == alone, "greedy replies to several prompts are those to each alone, in order"

    @pytest.mark.asyncio
    async def test_the_same_seed_gives_the_same_replies(self, started: InnerJobRunner) -> None:
        model = started.base_models()[0]
        first, second = [await _replies(started, model, *PROMPTS) for _ in range(2)]
        assert first == second, "sample() is deterministic in params.seed and the prompt's position"

    @pytest.mark.asyncio
    async def test_text_is_a_conversation_of_one_message(self, started: InnerJobRunner) -> None:
        model = started.base_models()[0]
        text = await _replies(started, model, PROMPTS[0])
        with no_error("a prompt may be a conversation that ends with a user message"):
            said = await _replies(started, model, [Message("user", PROMPTS[0])])
        assert said == text, "a prompt that is text means one user message, with the base model's own chat template"

    @pytest.mark.asyncio
    async def test_a_conversation_is_answered(self, started: InnerJobRunner) -> None:
        talk = [Message("user", PROMPTS[0]), Message("assistant", " 3 so 3"), Message("user", PROMPTS[1])]
        with no_error("a prompt may be a conversation that ends with a user message, among prompts of text"):
            replies = await _replies(started, started.base_models()[0], PROMPTS[0], talk)
        assert len(replies) == 2, "sample() gives one reply per prompt, whatever kind the prompts are of"

    @pytest.mark.asyncio
    async def test_several_models_are_served_at_once(self, started: InnerJobRunner, job: TrainingJob) -> None:
        await _finished(started, job)
        models: list[BaseModel | JobHandle] = [*started.base_models(), JobHandle(job.id)]
        alone = [await _replies(started, model, *PROMPTS) for model in models]
        together = await asyncio.gather(*(_replies(started, model, *PROMPTS) for model in models))
        assert together == alone, "several models may be served at once, each with its own replies"

    @pytest.mark.asyncio
    async def test_weights_stay_until_they_are_released(self, started: InnerJobRunner, job: TrainingJob) -> None:
        await _finished(started, job)
        with no_error("serve() takes the handle of a job that succeeded, as often as it is asked until release()"):
            first, second = [await _replies(started, JobHandle(job.id), *PROMPTS) for _ in range(2)]
        assert len(first) == len(second) == len(PROMPTS), "sample() gives one reply per prompt"

    @pytest.mark.asyncio
    async def test_serving_an_unknown_job_is_refused(self, started: InnerJobRunner) -> None:
        with raises(JobError, "serve() raises JobError for a handle that this runner doesn't know"):
            await _replies(started, UNKNOWN, PROMPTS[0])

    @pytest.mark.asyncio
    async def test_serving_a_failed_job_is_refused(self, started: InnerJobRunner, failing_job: TrainingJob) -> None:
        await _failure(started, failing_job)
        with raises(JobError, "serve() raises JobError for a job that failed: it has no weights"):
            await _replies(started, JobHandle(failing_job.id), PROMPTS[0])

    @pytest.mark.asyncio
    async def test_serving_a_released_job_is_refused(self, started: InnerJobRunner, job: TrainingJob) -> None:
        await _finished(started, job)
        await started.release(JobHandle(job.id))
        with raises(JobError, "serve() raises JobError for a job that was released: its weights are gone"):
            await _replies(started, JobHandle(job.id), PROMPTS[0])

    # -------------------------------------------------------------------------------------- release

    @pytest.mark.asyncio
    async def test_releasing_twice(self, started: InnerJobRunner, job: TrainingJob) -> None:
        await _finished(started, job)
        await started.release(JobHandle(job.id))
        with no_error("release() is idempotent"):
            await started.release(JobHandle(job.id))

    @pytest.mark.asyncio
    async def test_releasing_an_unknown_job(self, started: InnerJobRunner) -> None:
        with no_error("release() is idempotent, also for unknown handles"):
            await started.release(UNKNOWN)

    @pytest.mark.asyncio
    async def test_release_ends_a_running_job(self, started: InnerJobRunner, job: TrainingJob) -> None:
        handle = await started.submit(job)
        waiting = asyncio.create_task(started.wait(handle))
        await asyncio.sleep(0)
        await started.release(handle)
        ended = (await _in_time(asyncio.gather(waiting, return_exceptions=True)))[0]
        survived = isinstance(ended, JobResult) and ended.status == "succeeded"
        assert not survived, "release() ends a running job; this one went on to its end"

    @pytest.mark.asyncio
    async def test_kept_weights_are_in_the_run_folder(
        self, started: InnerJobRunner, job: TrainingJob, run: RunContext
    ) -> None:
        await _finished(started, job)
        await started.release(JobHandle(job.id), keep_weights=True)
        path = run.folder / "artifacts" / job.id / "model.safetensors"
        assert path.is_file(), f"release(keep_weights=True) keeps artifacts/{job.id}/model.safetensors"
        assert path.stat().st_size > 8, "the kept weights are no safetensors file: it has not even a header"

    @pytest.mark.asyncio
    async def test_weights_are_not_kept_unasked(
        self, started: InnerJobRunner, job: TrainingJob, run: RunContext
    ) -> None:
        await _finished(started, job)
        await started.release(JobHandle(job.id))
        path = run.folder / "artifacts" / job.id / "model.safetensors"
        assert not path.exists(), "release() without keep_weights gives the weights up"

    # -------------------------------------------------------------------------------------- attach

    @pytest.mark.asyncio
    async def test_a_job_that_is_gone_is_not_attached(self, started: InnerJobRunner) -> None:
        assert await started.attach(UNKNOWN) is None, "attach() gives None for a job that is gone; it makes up nothing"

    @pytest.mark.asyncio
    async def test_an_attached_job_is_the_same(self, started: InnerJobRunner, job: TrainingJob) -> None:
        await started.submit(job)
        found = await started.attach(JobHandle(job.id))
        if found is not None:
            result = await _in_time(started.wait(found))
            assert (found.job_id, result.job_id) == (job.id, job.id), "attach() gives a handle of the very job"

    @pytest.mark.asyncio
    async def test_attaching_starts_nothing(self, started: InnerJobRunner, job: TrainingJob, run: RunContext) -> None:
        handle = await started.submit(job)
        for _ in range(2):
            await started.attach(handle)
        await self._ran_once(started, run, handle, handle)

    # -------------------------------------------------------------------------------------- the end

    @pytest.mark.asyncio
    async def test_close_waits_for_running_jobs(self, started: InnerJobRunner, job: TrainingJob) -> None:
        waiting = asyncio.create_task(started.wait(await started.submit(job)))
        await asyncio.sleep(0)
        await _in_time(started.close(drain=True))
        with no_error("a wait() that began before close() gets its result"):
            result = await _in_time(asyncio.shield(waiting))
        assert result.status == "succeeded", "close(drain=True) waits for running jobs"

    @pytest.mark.asyncio
    async def test_close_in_haste_cancels_running_jobs(self, started: InnerJobRunner, job: TrainingJob) -> None:
        waiting = asyncio.create_task(started.wait(await started.submit(job)))
        await asyncio.sleep(0)
        await _in_time(started.close(drain=False))
        with no_error("a wait() that began before close() gets its result"):
            result = await _in_time(asyncio.shield(waiting))
        assert result.status == "cancelled", "close(drain=False) cancels running jobs"

    @pytest.mark.asyncio
    async def test_closing_twice(self, started: InnerJobRunner) -> None:
        await started.close()
        with no_error("close() is idempotent"):
            await started.close()

    @pytest.mark.asyncio
    async def test_closing_without_a_start(self, runner: InnerJobRunner) -> None:
        with no_error("close() is also called after an error of start(): nothing is there to release then"):
            await runner.close()

    @pytest.mark.asyncio
    async def test_a_closed_runner_starts_for_another_run(
        self, another_run: RunContext, started: InnerJobRunner, job: TrainingJob
    ) -> None:
        await _finished(started, job)
        await started.close()
        with no_error("a runner that was closed may be started for another run"):
            await started.start(another_run)
            result = await _finished(started, job)
            await started.release(JobHandle(job.id), keep_weights=True)
        kept = another_run.folder / "artifacts" / job.id / "model.safetensors"
        assert result.status == "succeeded", "a runner that was closed may be started for another run"
        assert kept.is_file(), "a runner that was started for another run works in that run's folder"

    @pytest.mark.asyncio
    async def test_another_run_knows_no_old_jobs(
        self, another_run: RunContext, started: InnerJobRunner, job: TrainingJob
    ) -> None:
        await _finished(started, job)
        await started.close()
        await started.start(another_run)
        with raises(JobError, "job ids are unique in a run: another run must not get the result of an old one"):
            await _in_time(started.wait(JobHandle(job.id)))


async def _in_time(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, HANG)


async def _finished(runner: InnerJobRunner, job: TrainingJob) -> JobResult:
    result: JobResult = await _in_time(runner.wait(await runner.submit(job)))
    return result


async def _failure(runner: InnerJobRunner, job: TrainingJob) -> Any:
    """The failure of a job, where it is told at all: that it is, is said by a test of its own."""
    try:
        return (await _finished(runner, job)).failure
    except Exception:
        return None


async def _replies(
    runner: InnerJobRunner, model: BaseModel | JobHandle, *prompts: Prompt, params: SamplingParams = SAMPLED
) -> list[str]:
    async with runner.serve(model) as served:
        return await served.sample(prompts, params)


def _finite(metrics: Mapping[str, float]) -> bool:
    return all(isinstance(value, int | float) and math.isfinite(value) for value in metrics.values())


def _outside(key: ConfigKey, value: Any) -> str:
    """Why a value is not one of its key; empty when it is."""
    kinds: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
    right = isinstance(value, kinds[key.type]) and (key.type == "bool" or not isinstance(value, bool))
    if not right:
        return f"{value!r} is no {key.type}"
    if key.low is not None and value < key.low:
        return f"{value!r} is below {key.low}"
    if key.high is not None and value > key.high:
        return f"{value!r} is above {key.high}"
    if key.choices and value not in key.choices:
        return f"{value!r} is none of {', '.join(key.choices)}"
    return ""
