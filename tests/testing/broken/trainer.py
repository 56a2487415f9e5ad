"""Outer trainers with one fault each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from ai_trains_ai.errors import PolicyError
from ai_trains_ai.interfaces import OuterTrainer, Policy, RunContext
from ai_trains_ai.records import Checkpoint, EpisodeGroup, Exported, Message, SamplingParams, TrainStep, Turn
from ai_trains_ai.testing import OuterTrainerContract, ScriptedAgent
from ai_trains_ai.testing.fakes import ScriptedPolicy


class Contract(OuterTrainerContract):
    """The fixture returns an instance of ``broken``, whose policies are of ``says`` where that is given."""

    fails: set[str] = set()
    broken: type[ScriptedAgent] = ScriptedAgent
    says: type[ScriptedPolicy] | None = None

    def _make(self) -> OuterTrainer:
        says = self.says
        if says is None:
            return self.broken()

        class Saying(self.broken):  # type: ignore[misc, name-defined]
            async def start(self, run: RunContext, checkpoint: Checkpoint | None = None) -> None:
                await super().start(run, checkpoint)
                self.policy = says(self.version)

            async def train_step(self, groups: Sequence[EpisodeGroup]) -> TrainStep:
                step = await super().train_step(groups)
                self.policy = says(self.version)
                return step

        return Saying()

    @pytest.fixture
    def trainer(self) -> OuterTrainer:
        return self._make()

    @pytest.fixture
    def another(self) -> OuterTrainer:
        return self._make()


class TestWhole(Contract):
    """What the others break."""


class Spoilt(ScriptedPolicy):
    """Spoils turns with `spoil`."""

    def spoil(self, turn: Turn) -> Turn:
        return turn

    async def act(
        self, conversation: Sequence[Message], tools: Sequence[Mapping[str, Any]], params: SamplingParams
    ) -> Turn:
        return self.spoil(await super().act(conversation, tools, params))


# ------------------------------------------------------------------------------------------ acting


class TestCallsAsTheyCome(Contract):
    """It hands on the calls as the service sent them."""

    fails = {"test_a_turn_is_whole"}

    class says(Spoilt):
        def spoil(self, turn: Turn) -> Turn:
            return evolve(turn, calls=({"name": "submit", "arguments": "{}"},))  # type: ignore[arg-type]


class TestForgetsItsVersion(Contract):
    """It numbers turns by the connection that they came through."""

    fails = {
        "test_a_turn_carries_the_version_of_its_snapshot",
        "test_many_conversations_act_at_once",
        "test_a_step_publishes_its_version",
        "test_an_older_snapshot_still_acts",
        "test_acting_goes_on_while_a_step_is_trained",
    }

    class says(Spoilt):
        def spoil(self, turn: Turn) -> Turn:
            return evolve(turn, policy_version=9)


class TestAnswersDoNotFit(Contract):
    """Its chat template has no room for the answer of a tool."""

    fails = {"test_a_conversation_goes_on_after_answers"}

    class says(Spoilt):
        async def act(
            self, conversation: Sequence[Message], tools: Sequence[Mapping[str, Any]], params: SamplingParams
        ) -> Turn:
            if len(conversation) > 2:
                return Turn("", (), "context", self.version)
            return await super().act(conversation, tools, params)


class TestOneConversationAtATime(Contract):
    """Its session takes one request at a time."""

    fails = {"test_many_conversations_act_at_once"}

    class says(ScriptedPolicy):
        busy = 0

        async def act(
            self, conversation: Sequence[Message], tools: Sequence[Mapping[str, Any]], params: SamplingParams
        ) -> Turn:
            if self.busy > 4:
                raise PolicyError("429: too many requests")
            self.busy += 1
            try:
                return await super().act(conversation, tools, params)
            finally:
                self.busy -= 1


class TestCancelsTheBatch(Contract):
    """A cancelled request takes its batch with it."""

    fails = {"test_a_cancelled_act_leaves_the_others_alone"}

    class says(ScriptedPolicy):
        broken = False

        async def act(
            self, conversation: Sequence[Message], tools: Sequence[Mapping[str, Any]], params: SamplingParams
        ) -> Turn:
            try:
                turn = await super().act(conversation, tools, params)
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                self.broken = True
                raise
            if self.broken:
                raise PolicyError("the batch was cancelled")
            return turn


class TestTooLongRaises(Contract):
    """It passes on the service's complaint about a long prompt."""

    fails = {"test_what_does_not_fit_the_context_says_so"}

    class says(Spoilt):
        def spoil(self, turn: Turn) -> Turn:
            if turn.stop_reason == "context":
                raise PolicyError("400: prompt too long")
            return turn


class TestTooLongIsLong(Contract):
    """It cuts what doesn't fit, and says that the turn was long."""

    fails = {"test_what_does_not_fit_the_context_says_so"}

    class says(Spoilt):
        def spoil(self, turn: Turn) -> Turn:
            return evolve(turn, stop_reason="length") if turn.stop_reason == "context" else turn


class TestSnapshotsAnew(Contract):
    """Every snapshot copies the weights."""

    fails = {"test_a_snapshot_stays_the_newest_until_it_is_trained"}

    class broken(ScriptedAgent):
        async def snapshot(self) -> Policy:
            return ScriptedPolicy(self.version)


class TestClosesOnce(Contract):
    """It closes a client that is gone."""

    fails = {"test_closing_twice"}

    class broken(ScriptedAgent):
        closed = 0

        async def close(self) -> None:
            self.closed += 1
            if self.closed == 2:
                raise PolicyError("the client is closed")


class TestCloseNeedsAStart(Contract):
    """It closes what start made."""

    fails = {"test_closing_without_a_start"}

    class broken(ScriptedAgent):
        async def close(self) -> None:
            _ = self.policy


# ------------------------------------------------------------------------------------------ tokens


class TestNoTokens(Contract):
    """It keeps the text alone."""

    fails = {"test_a_trainers_turn_has_its_tokens", "test_trained_tokens_are_counted"}

    class says(Spoilt):
        def spoil(self, turn: Turn) -> Turn:
            return evolve(turn, prompt_ids=(), ids=(), logprobs=())


class TestNoLogprobOfTheStop(Contract):
    """The service gives no log-probability for the last token."""

    fails = {"test_every_token_has_a_log_probability"}

    class says(Spoilt):
        def spoil(self, turn: Turn) -> Turn:
            return evolve(turn, logprobs=turn.logprobs[:-1])


class TestProbabilities(Contract):
    """It gives negative log-probabilities, as a loss has them."""

    fails = {"test_log_probabilities_are_those_of_a_law"}

    class says(Spoilt):
        def spoil(self, turn: Turn) -> Turn:
            return evolve(turn, logprobs=tuple(-value for value in turn.logprobs))


class TestOneMore(Contract):
    """It bounds the sampled tokens before it adds the stop token."""

    fails = {"test_a_turn_is_no_longer_than_asked"}

    class says(Spoilt):
        def spoil(self, turn: Turn) -> Turn:
            return evolve(turn, ids=(*turn.ids, self.STOP), logprobs=(*turn.logprobs, -0.1))


class TestRendersAnew(Contract):
    """It renders the whole conversation from text at every turn."""

    fails = {"test_prompts_extend_what_was_sampled_exactly"}

    class says(ScriptedPolicy):
        def prompt(self, conversation: Sequence[Message]) -> tuple[int, ...]:
            bare = [evolve(message, turn=None) for message in conversation]
            return (1, *super().prompt(bare)[1:])


# ------------------------------------------------------------------------------------------ training


class TestVersionStandsStill(Contract):
    """It learns and keeps its number."""

    fails = {
        "test_a_step_raises_the_version_by_one",
        "test_a_degenerate_group_is_a_version_too",
        "test_masked_episodes_are_left_out",
        "test_no_groups_are_a_version_too",
        "test_a_resumed_trainer_goes_on",
        "test_episodes_of_an_older_version_are_taken",
    }

    class broken(ScriptedAgent):
        async def train_step(self, groups: Sequence[EpisodeGroup]) -> TrainStep:
            before = self.version
            step = await super().train_step(groups)
            self.version, self.policy = before, ScriptedPolicy(before)
            return evolve(step, version=before)


class TestPublishesNothing(Contract):
    """It trains, and goes on handing out what it had."""

    fails = {"test_a_step_publishes_its_version"}

    class broken(ScriptedAgent):
        async def train_step(self, groups: Sequence[EpisodeGroup]) -> TrainStep:
            before = self.policy
            step = await super().train_step(groups)
            self.policy = before
            return step


class TestNothingToLearnIsNoVersion(Contract):
    """Without a gradient it takes no step."""

    fails = {"test_a_degenerate_group_is_a_version_too", "test_no_groups_are_a_version_too"}

    class broken(ScriptedAgent):
        async def train_step(self, groups: Sequence[EpisodeGroup]) -> TrainStep:
            if not any(advantage for group in groups for advantage in group.advantages):
                return TrainStep(self.version, {}, 0)
            return await super().train_step(groups)


class TestMeanOfNone(Contract):
    """It takes the mean of advantages, and None is no number."""

    fails = {"test_masked_episodes_are_left_out", "test_nothing_is_trained_on_when_all_is_masked"}

    class broken(ScriptedAgent):
        async def train_step(self, groups: Sequence[EpisodeGroup]) -> TrainStep:
            sum(sum(group.advantages) for group in groups)  # type: ignore[arg-type]
            return await super().train_step(groups)


class TestCountsEverything(Contract):
    """It counts the tokens that it was given."""

    fails = {"test_nothing_is_trained_on_when_all_is_masked", "test_trained_tokens_are_counted"}

    class broken(ScriptedAgent):
        async def train_step(self, groups: Sequence[EpisodeGroup]) -> TrainStep:
            tokens = sum(
                len(segment.ids) for group in groups for episode in group.episodes for segment in episode.segments
            )
            return evolve(await super().train_step(groups), tokens=tokens)


class TestOnPolicyAlone(Contract):
    """It refuses what an older version played."""

    fails = {"test_episodes_of_an_older_version_are_taken"}

    class broken(ScriptedAgent):
        async def train_step(self, groups: Sequence[EpisodeGroup]) -> TrainStep:
            if any(episode.policy_versions != (self.version,) for group in groups for episode in group.episodes):
                raise PolicyError("off-policy")
            return await super().train_step(groups)


class TestOddMetrics(Contract):
    """It has names of its own for its metrics."""

    fails = {"test_metrics_are_finite_and_slash_named"}

    class broken(ScriptedAgent):
        async def train_step(self, groups: Sequence[EpisodeGroup]) -> TrainStep:
            return evolve(await super().train_step(groups), metrics={"loss": 0.5})


class TestHalfAStep(Contract):
    """It publishes, and then finds that the gradient was not finite."""

    fails = {"test_a_step_is_all_or_nothing"}

    class broken(ScriptedAgent):
        async def train_step(self, groups: Sequence[EpisodeGroup]) -> TrainStep:
            try:
                return await super().train_step(groups)
            except PolicyError:
                await super().train_step([])
                raise


class TestTrainsInPlace(Contract):
    """Every snapshot is the model itself."""

    fails = {
        "test_an_older_snapshot_keeps_its_version",
        "test_an_older_snapshot_still_acts",
    }

    class broken(ScriptedAgent):
        async def train_step(self, groups: Sequence[EpisodeGroup]) -> TrainStep:
            model = self.policy
            step = await super().train_step(groups)
            model.version, self.policy = step.version, model
            return step


class TestDropsOldSnapshots(Contract):
    """It frees the weights of a snapshot when a newer one is published."""

    fails = {"test_an_older_snapshot_still_acts", "test_acting_goes_on_while_a_step_is_trained"}

    class says(ScriptedPolicy):
        newest = -1

        def __init__(self, version: int) -> None:
            super().__init__(version)
            type(self).newest = version

        async def act(
            self, conversation: Sequence[Message], tools: Sequence[Mapping[str, Any]], params: SamplingParams
        ) -> Turn:
            await asyncio.sleep(0)
            if self.version != self.newest:
                raise PolicyError("these weights were freed")
            return await super().act(conversation, tools, params)


# ------------------------------------------------------------------------------------------ checkpoints


class TestNamesItsOwnCheckpoints(Contract):
    """It counts checkpoints itself."""

    fails = {"test_a_checkpoint_says_what_it_is", "test_saving_twice_is_the_same_checkpoint"}

    class broken(ScriptedAgent):
        saved = 0

        async def save(self, name: str) -> Checkpoint:
            self.saved += 1
            return evolve(await super().save(name), name=f"checkpoint-{self.saved}")


class TestSaveLosesTheVersion(Contract):
    """It keeps the weights, and not their number."""

    fails = {
        "test_a_saved_version_comes_back",
        "test_a_resumed_trainer_goes_on",
        "test_a_name_is_saved_over",
        "test_the_newest_two_checkpoints_resume",
    }

    class broken(ScriptedAgent):
        async def start(self, run: RunContext, checkpoint: Checkpoint | None = None) -> None:
            await super().start(run)


class TestResumesToActAlone(Contract):
    """It resumes without the state of its optimizer."""

    fails = {"test_a_resumed_trainer_goes_on"}

    class broken(ScriptedAgent):
        resumed = False

        async def start(self, run: RunContext, checkpoint: Checkpoint | None = None) -> None:
            await super().start(run, checkpoint)
            self.resumed = checkpoint is not None

        async def train_step(self, groups: Sequence[EpisodeGroup]) -> TrainStep:
            if self.resumed:
                raise PolicyError("no optimizer")
            return await super().train_step(groups)


class TestSavesOnce(Contract):
    """It refuses to write over a checkpoint."""

    fails = {"test_saving_twice_is_the_same_checkpoint", "test_a_name_is_saved_over"}

    class broken(ScriptedAgent):
        async def save(self, name: str) -> Checkpoint:
            self.names = getattr(self, "names", set())
            if name in self.names:
                raise PolicyError(f"{name} exists")
            self.names.add(name)
            return await super().save(name)


class TestKeepsTheFirst(Contract):
    """A name that exists stays what it was."""

    fails = {"test_a_name_is_saved_over"}

    class broken(ScriptedAgent):
        async def save(self, name: str) -> Checkpoint:
            self.names = getattr(self, "names", {})
            if name not in self.names:
                self.names[name] = await super().save(name)
            return self.names[name]  # type: ignore[no-any-return]


class TestKeepsTheNewestAlone(Contract):
    """Every checkpoint is written over the one before."""

    fails = {"test_the_newest_two_checkpoints_resume"}

    class broken(ScriptedAgent):
        async def save(self, name: str) -> Checkpoint:
            return evolve(await super().save("latest"), name=name)


class TestExportsElsewhere(Contract):
    """It exports beside the checkpoint."""

    fails = {"test_an_export_is_in_its_folder"}

    class broken(ScriptedAgent):
        async def export(self, checkpoint: Checkpoint, folder: Path) -> Exported:
            return await super().export(checkpoint, self._folder / "exports")


class TestExportsAnotherKind(Contract):
    """It has a word of its own for an adapter."""

    fails = {"test_an_export_says_its_kind"}

    class broken(ScriptedAgent):
        async def export(self, checkpoint: Checkpoint, folder: Path) -> Exported:
            return evolve(await super().export(checkpoint, folder), kind="lora")  # type: ignore[arg-type]


class TestExportsOnce(Contract):
    """It makes a folder that exists."""

    fails = {"test_exporting_twice"}

    class broken(ScriptedAgent):
        async def export(self, checkpoint: Checkpoint, folder: Path) -> Exported:
            await asyncio.to_thread(folder.mkdir)
            return await super().export(checkpoint, folder)


class TestExportsWhatItHas(Contract):
    """Whatever the checkpoint, it exports the newest weights."""

    fails = {"test_a_checkpoint_that_is_gone_is_not_exported"}

    class broken(ScriptedAgent):
        async def export(self, checkpoint: Checkpoint, folder: Path) -> Exported:
            return await super().export(await self.save("export"), folder)
