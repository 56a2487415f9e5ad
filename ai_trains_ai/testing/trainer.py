"""What every outer policy promises, and every outer trainer on top."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest
import pytest_asyncio

from ai_trains_ai.agent.rollout import segments
from ai_trains_ai.agent.tools import TOOLS
from ai_trains_ai.errors import PolicyError, StorageError
from ai_trains_ai.interfaces import OuterPolicy, OuterTrainer, Policy, RunContext
from ai_trains_ai.records import (
    Checkpoint,
    Episode,
    EpisodeGroup,
    EpisodeStatus,
    Message,
    SamplingParams,
    StopReason,
    ToolCall,
    TrainStep,
    Turn,
)
from ai_trains_ai.testing.expect import no_error, raises
from ai_trains_ai.testing.fakes import run_context

HANG = 600.0  # seconds after which something that should be over counts as hung
MAX_TOKENS = 32
TURNS = 3


class OuterPolicyContract:
    """Subclass it and give your policy, not started.

    >>> class TestMyPolicy(OuterPolicyContract):
    ...     @pytest.fixture
    ...     def policy(self):
    ...         return MyPolicy("http://127.0.0.1:8000")

    Attributes:
        overlong: characters that are too many for the context; ``None`` where none is known, and one test is left out.
        tools: what the agent is told that it may call.
    """

    overlong: ClassVar[int | None] = 200_000
    tools: ClassVar[Sequence[Mapping[str, Any]]] = TOOLS

    @pytest.fixture
    def policy(self) -> OuterPolicy:
        raise NotImplementedError("override the fixture 'policy' and return your OuterPolicy, not started")

    @pytest.fixture
    def run(self, tmp_path: Path) -> Iterator[RunContext]:
        """What a run lends to the policy."""
        with run_context(tmp_path / "run") as run:
            yield run

    @pytest_asyncio.fixture
    async def begun(self, policy: OuterPolicy, run: RunContext) -> AsyncIterator[OuterPolicy]:
        """The policy, started, and closed afterwards."""
        await policy.start(run)
        yield policy
        await policy.close()

    async def _act(self, policy: Policy, conversation: Sequence[Message] | None = None, seed: int = 0) -> Turn:
        params = SamplingParams(max_tokens=MAX_TOKENS, seed=seed)
        return await asyncio.wait_for(policy.act(conversation or opening(), self.tools, params), HANG)

    async def _talk(self, policy: Policy, number: int = 0) -> list[Message]:
        """A conversation of some turns; every call is answered, and prose gets a question back."""
        messages = opening(number)
        for count in range(TURNS):
            turn = await self._act(policy, messages, 100 * number + count)
            if turn.stop_reason == "context":
                break
            messages.append(Message("assistant", turn.text, turn))
            messages += [Message("tool", "written") for _ in turn.calls] or [Message("user", "Go on.")]
        return messages

    # -------------------------------------------------------------------------------------- acting

    @pytest.mark.asyncio
    async def test_a_turn_is_whole(self, begun: OuterPolicy) -> None:
        turn = await self._act(await begun.snapshot())
        assert isinstance(turn, Turn), "act() returns a Turn"
        assert isinstance(turn.text, str), "Turn.text is what the policy said"
        assert turn.stop_reason in get_args(StopReason), f"Turn.stop_reason is one of {get_args(StopReason)}"
        assert all(isinstance(call, ToolCall) for call in turn.calls), "Turn.calls are ToolCalls, broken ones too"

    @pytest.mark.asyncio
    async def test_a_turn_carries_the_version_of_its_snapshot(self, begun: OuterPolicy) -> None:
        policy = await begun.snapshot()
        assert (await self._act(policy)).policy_version == policy.version, "Turn.policy_version is its snapshot's"

    @pytest.mark.asyncio
    async def test_a_conversation_goes_on_after_answers(self, begun: OuterPolicy) -> None:
        policy = await begun.snapshot()
        with no_error("act() takes a conversation that ends with tool messages, in the order of the calls"):
            messages = await self._talk(policy)
        assert sum(message.role == "assistant" for message in messages) >= 2, "the context holds no second turn"

    @pytest.mark.asyncio
    async def test_many_conversations_act_at_once(self, begun: OuterPolicy) -> None:
        policy = await begun.snapshot()
        with no_error("act() is called from many episodes at once"):
            turns = await asyncio.gather(*(self._act(policy, opening(number), number) for number in range(8)))
        assert all(turn.policy_version == policy.version for turn in turns), "each gets a turn of this snapshot"

    @pytest.mark.asyncio
    async def test_a_cancelled_act_leaves_the_others_alone(self, begun: OuterPolicy) -> None:
        policy = await begun.snapshot()
        acting = [asyncio.create_task(self._act(policy, opening(number), number)) for number in range(4)]
        await asyncio.sleep(0)
        acting[1].cancel()
        others = [task for task in acting if task is not acting[1]]
        with no_error("a cancelled act() leaves the others alone"):
            await asyncio.gather(*others)
        await asyncio.gather(acting[1], return_exceptions=True)
        with no_error("a cancelled act() leaves those that come after it alone"):
            await self._act(policy)

    @pytest.mark.asyncio
    async def test_what_does_not_fit_the_context_says_so(self, begun: OuterPolicy) -> None:
        if self.overlong is None:
            pytest.skip("overlong is None: no limit is known")
        long = [*opening()[:1], Message("user", "word " * (self.overlong // 5))]
        with no_error("a conversation that doesn't fit is a turn, not an exception"):
            turn = await self._act(await begun.snapshot(), long)
        assert turn.stop_reason == "context", "a conversation that doesn't fit gives a turn with stop_reason 'context'"

    @pytest.mark.asyncio
    async def test_a_snapshot_stays_the_newest_until_it_is_trained(self, begun: OuterPolicy) -> None:
        first = await begun.snapshot()
        await self._act(first)
        assert (await begun.snapshot()) is first, "snapshot() gives the same policy until a train_step()"

    @pytest.mark.asyncio
    async def test_closing_twice(self, begun: OuterPolicy) -> None:
        await begun.close()
        with no_error("close() is idempotent"):
            await begun.close()

    @pytest.mark.asyncio
    async def test_closing_without_a_start(self, policy: OuterPolicy) -> None:
        with no_error("close() is also called when start() failed: nothing is there to release then"):
            await policy.close()


class OuterTrainerContract(OuterPolicyContract):
    """Subclass it and give your trainer, not started.

    >>> class TestMyTrainer(OuterTrainerContract):
    ...     @pytest.fixture
    ...     def trainer(self):
    ...         return MyTrainer(lr=1e-5)
    ...
    ...     @pytest.fixture
    ...     def another(self):
    ...         return MyTrainer(lr=1e-5)

    ``another`` is a second one like it, for what a resume starts; by default it is made without arguments. Trains about
    thirty small steps, so give a small model.
    """

    @pytest.fixture
    def trainer(self) -> OuterTrainer:
        raise NotImplementedError("override the fixture 'trainer' and return your OuterTrainer, not started")

    @pytest.fixture
    def another(self, trainer: OuterTrainer) -> OuterTrainer:
        """A second trainer like the first, not started."""
        return type(trainer)()

    @pytest.fixture
    def policy(self, trainer: OuterTrainer) -> OuterPolicy:
        return trainer

    @pytest_asyncio.fixture
    async def started(self, trainer: OuterTrainer, run: RunContext) -> AsyncIterator[OuterTrainer]:
        """The trainer, started, and closed afterwards."""
        await trainer.start(run)
        yield trainer
        await trainer.close()

    async def _group(self, trainer: OuterTrainer, *advantages: float | None) -> EpisodeGroup:
        """A group that the newest snapshot played, with these advantages."""
        policy = await trainer.snapshot()
        talks = await asyncio.gather(*(self._talk(policy, number) for number in range(len(advantages))))
        episodes = []
        for number, (messages, advantage) in enumerate(zip(talks, advantages, strict=True)):
            turns = [message.turn for message in messages if message.turn is not None]
            status: EpisodeStatus = "infrastructure" if advantage is None else "finished"
            head = (f"episode-{number}", "group", "task", number, status, "turns")
            tokens = segments(turns)
            episodes.append(Episode(*head, tuple(messages), tokens, (policy.version,), attempts=0, valid_attempt=None))
        known = {advantage for advantage in advantages if advantage is not None}
        return EpisodeGroup("group", "task", tuple(episodes), advantages, degenerate=known <= {0.0})

    async def _step(self, trainer: OuterTrainer, *groups: EpisodeGroup) -> TrainStep:
        return await asyncio.wait_for(trainer.train_step(groups), HANG)

    async def _learn(self, trainer: OuterTrainer) -> TrainStep:
        return await self._step(trainer, await self._group(trainer, 1.0, -1.0))

    # -------------------------------------------------------------------------------------- tokens

    @pytest.mark.asyncio
    async def test_a_trainers_turn_has_its_tokens(self, started: OuterTrainer) -> None:
        turn = await self._act(await started.snapshot())
        assert turn.prompt_ids, "Turn.prompt_ids are the tokens of everything before the turn"
        assert turn.ids, "Turn.ids are the sampled tokens, the stop token included"

    @pytest.mark.asyncio
    async def test_every_token_has_a_log_probability(self, started: OuterTrainer) -> None:
        turn = await self._act(await started.snapshot())
        assert len(turn.logprobs) == len(turn.ids), "Turn.logprobs has one natural logarithm for each id"

    @pytest.mark.asyncio
    async def test_log_probabilities_are_those_of_a_law(self, started: OuterTrainer) -> None:
        logprobs = (await self._act(await started.snapshot())).logprobs
        odd = [value for value in logprobs if not math.isfinite(value) or value > 1e-4]
        assert not odd, "a log-probability is finite and not above 0"

    @pytest.mark.asyncio
    async def test_a_turn_is_no_longer_than_asked(self, started: OuterTrainer) -> None:
        turn = await self._act(await started.snapshot())
        assert len(turn.ids) <= MAX_TOKENS, "params.max_tokens bounds Turn.ids, the stop token included"

    @pytest.mark.asyncio
    async def test_prompts_extend_what_was_sampled_exactly(self, started: OuterTrainer) -> None:
        turns = [m.turn for m in await self._talk(await started.snapshot()) if m.turn is not None]
        for before, after in pairwise(turns):
            told = (*before.prompt_ids, *before.ids)
            assert after.prompt_ids[: len(told)] == told, "token in, token out: never render a sampled turn anew"

    # -------------------------------------------------------------------------------------- training

    @pytest.mark.asyncio
    async def test_a_step_raises_the_version_by_one(self, started: OuterTrainer) -> None:
        before = (await started.snapshot()).version
        step = await self._learn(started)
        assert step.version == before + 1, "TrainStep.version is the one before plus 1"

    @pytest.mark.asyncio
    async def test_a_step_publishes_its_version(self, started: OuterTrainer) -> None:
        step = await self._learn(started)
        newest = await started.snapshot()
        turn = await self._act(newest)
        assert (newest.version, turn.policy_version) == (step.version, step.version), "snapshot() is the new version"

    @pytest.mark.asyncio
    async def test_a_degenerate_group_is_a_version_too(self, started: OuterTrainer) -> None:
        before = (await started.snapshot()).version
        group = await self._group(started, 0.0, 0.0)
        with no_error("degenerate groups are left out of the update, and the version rises all the same"):
            step = await self._step(started, group)
        assert step.version == before + 1, "the version rises by one, also when there was nothing to learn from"

    @pytest.mark.asyncio
    async def test_masked_episodes_are_left_out(self, started: OuterTrainer) -> None:
        before = (await started.snapshot()).version
        group = await self._group(started, None, 1.0, -1.0)
        with no_error("an advantage of None masks its episode; the others are trained on"):
            step = await self._step(started, group)
        assert step.version == before + 1, "the version rises by one"

    @pytest.mark.asyncio
    async def test_nothing_is_trained_on_when_all_is_masked(self, started: OuterTrainer) -> None:
        group = await self._group(started, None, None)
        with no_error("an advantage of None masks its episode, and there may be no other"):
            step = await self._step(started, group)
        assert step.tokens == 0, "TrainStep.tokens counts what was trained on, and these were masked"

    @pytest.mark.asyncio
    async def test_no_groups_are_a_version_too(self, started: OuterTrainer) -> None:
        before = (await started.snapshot()).version
        with no_error("train_step() without groups has nothing to learn from, and the version rises all the same"):
            step = await self._step(started)
        assert step.version == before + 1, "the version rises by one, also when there was nothing to learn from"

    @pytest.mark.asyncio
    async def test_trained_tokens_are_counted(self, started: OuterTrainer) -> None:
        group = await self._group(started, 1.0, -1.0)
        sampled = sum(sum(segment.mask) for episode in group.episodes for segment in episode.segments)
        tokens = (await self._step(started, group)).tokens
        assert 0 < tokens <= sampled, f"TrainStep.tokens counts sampled tokens, here {sampled} at most, not prompts"

    @pytest.mark.asyncio
    async def test_episodes_of_an_older_version_are_taken(self, started: OuterTrainer) -> None:
        group = await self._group(started, 1.0, -1.0)
        before = (await self._step(started, group)).version
        with no_error("Episode.policy_versions may be older than the newest"):
            step = await self._step(started, group)
        assert step.version == before + 1, "the version rises by one"

    @pytest.mark.asyncio
    async def test_metrics_are_finite_and_slash_named(self, started: OuterTrainer) -> None:
        metrics = (await self._learn(started)).metrics
        odd = {name: value for name, value in metrics.items() if "/" not in name or not math.isfinite(value)}
        assert not odd, "TrainStep.metrics are finite, with slash-named keys such as outer/kl"

    @pytest.mark.asyncio
    async def test_a_step_is_all_or_nothing(self, started: OuterTrainer) -> None:
        before = (await started.snapshot()).version
        group = await self._group(started, float("nan"), 1.0)
        try:
            expected = (await self._step(started, group)).version
        except PolicyError:
            expected = before
        assert expected in (before, before + 1), "the version rises by one, or the call raises"
        assert (await started.snapshot()).version == expected, "when train_step() raises, the policy is as it was"

    @pytest.mark.asyncio
    async def test_an_older_snapshot_keeps_its_version(self, started: OuterTrainer) -> None:
        old = await started.snapshot()
        before = old.version
        await self._learn(started)
        assert old.version == before, "a snapshot is frozen: train_step() publishes a new one beside it"

    @pytest.mark.asyncio
    async def test_an_older_snapshot_still_acts(self, started: OuterTrainer) -> None:
        old = await started.snapshot()
        before = old.version
        await self._learn(started)
        with no_error("a snapshot is valid until its trainer is closed"):
            turn = await self._act(old)
        assert turn.policy_version == before, "an older snapshot still samples from its own version"

    @pytest.mark.asyncio
    async def test_acting_goes_on_while_a_step_is_trained(self, started: OuterTrainer) -> None:
        policy, group = await started.snapshot(), await self._group(started, 1.0, -1.0)
        with no_error("act() goes on while train_step() is under way"):
            acting = asyncio.gather(*(self._act(policy, opening(number), number) for number in range(3)))
            await self._step(started, group)
            turns = await acting
        assert {turn.policy_version for turn in turns} == {policy.version}, "they sample from the version they began on"

    # -------------------------------------------------------------------------------------- checkpoints

    @pytest.mark.asyncio
    async def test_a_checkpoint_says_what_it_is(self, started: OuterTrainer) -> None:
        version = (await self._learn(started)).version
        checkpoint = await started.save("step-0000")
        assert (checkpoint.name, checkpoint.version) == ("step-0000", version), "Checkpoint has its name and version"

    @pytest.mark.asyncio
    async def test_a_saved_version_comes_back(
        self, started: OuterTrainer, another: OuterTrainer, run: RunContext
    ) -> None:
        version = (await self._learn(started)).version
        assert await self._resumed(another, run, await started.save("step-0000")) == version, (
            "start(run, checkpoint) goes on from the version that save() kept"
        )

    @pytest.mark.asyncio
    async def test_a_resumed_trainer_goes_on(
        self, started: OuterTrainer, another: OuterTrainer, run: RunContext
    ) -> None:
        version = (await self._learn(started)).version
        checkpoint = await started.save("step-0000")
        await another.start(run, checkpoint)
        try:
            with no_error("a resumed trainer acts and trains on"):
                step = await self._learn(another)
        finally:
            await another.close()
        assert step.version == version + 1, "the first step after a resume is the next version"

    @pytest.mark.asyncio
    async def test_saving_twice_is_the_same_checkpoint(self, started: OuterTrainer) -> None:
        await self._learn(started)
        first = await started.save("step-0000")
        with no_error("save() is idempotent"):
            second = await started.save("step-0000")
        assert second == first, "save() of the same state under the same name gives the same checkpoint"

    @pytest.mark.asyncio
    async def test_a_name_is_saved_over(self, started: OuterTrainer, another: OuterTrainer, run: RunContext) -> None:
        await started.save("step-0000")
        version = (await self._learn(started)).version
        checkpoint = await started.save("step-0000")
        assert await self._resumed(another, run, checkpoint) == version, "the same name again replaces what it named"

    @pytest.mark.asyncio
    async def test_the_newest_two_checkpoints_resume(
        self, started: OuterTrainer, another: OuterTrainer, run: RunContext
    ) -> None:
        await started.save("step-0000")
        version = (await self._learn(started)).version
        second = await started.save("step-0001")
        await self._learn(started)
        await started.save("step-0002")
        with no_error("a trainer never drops what the newest two checkpoints need"):
            found = await self._resumed(another, run, second)
        assert found == version, "the checkpoint before the newest is still the version that it was"

    async def _resumed(self, another: OuterTrainer, run: RunContext, checkpoint: Checkpoint) -> int:
        """The version that a new trainer begins with."""
        try:
            await another.start(run, checkpoint)
            return (await another.snapshot()).version
        finally:
            await another.close()

    @pytest.mark.asyncio
    async def test_an_export_is_in_its_folder(self, started: OuterTrainer, tmp_path: Path) -> None:
        checkpoint = await started.save("step-0000")
        await started.export(checkpoint, tmp_path / "export")
        written = [path for path in (tmp_path / "export").rglob("*") if path.is_file() and path.stat().st_size]
        assert written, "export() writes the weights into the folder that it was given"

    @pytest.mark.asyncio
    async def test_an_export_says_its_kind(self, started: OuterTrainer, tmp_path: Path) -> None:
        exported = await started.export(await started.save("step-0000"), tmp_path / "export")
        assert exported.kind in ("adapter", "weights"), "Exported.kind is 'adapter' for a PEFT adapter, or 'weights'"

    @pytest.mark.asyncio
    async def test_exporting_twice(self, started: OuterTrainer, tmp_path: Path) -> None:
        checkpoint = await started.save("step-0000")
        first = await started.export(checkpoint, tmp_path / "export")
        with no_error("export() is idempotent"):
            second = await started.export(checkpoint, tmp_path / "export")
        assert second == first, "export() is idempotent"

    @pytest.mark.asyncio
    async def test_a_checkpoint_that_is_gone_is_not_exported(self, started: OuterTrainer, tmp_path: Path) -> None:
        gone = Checkpoint("gone", "checkpoints/gone", 1)
        with raises((PolicyError, StorageError), "export() raises PolicyError or StorageError for a lost checkpoint"):
            await started.export(gone, tmp_path / "export")


def opening(number: int = 0) -> list[Message]:
    """How a conversation begins."""
    return [
        Message("system", "You write training jobs for small models."),
        Message("user", f"Task {number}. Write environment.py and job.toml, then submit."),
    ]
