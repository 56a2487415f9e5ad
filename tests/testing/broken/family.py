"""Families with one fault each: chained arithmetic, written a little worse."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from attrs import evolve

from ai_trains_ai.families.chained_arithmetic import ChainedArithmetic
from ai_trains_ai.families.worked import final_answer
from ai_trains_ai.interfaces import TaskFamily
from ai_trains_ai.records import Item, Task
from ai_trains_ai.testing import TaskFamilyContract


class TestWhole(TaskFamilyContract):
    fails: set[str] = set()

    @pytest.fixture
    def family(self) -> TaskFamily:
        return ChainedArithmetic()

    @pytest.fixture
    def dry(self, family: TaskFamily) -> tuple[Task, int]:
        return _task(1, 1), 100


def _task(low: int, high: int) -> Task:
    return Task("chains", ChainedArithmetic.name, "", "", {"low": low, "high": high})


class Padded(ChainedArithmetic):
    name = "chained-arithmetic "


class TestHasBlanksInItsName(TaskFamilyContract):
    fails = {"test_it_has_a_name"}

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Padded()


class Mute(ChainedArithmetic):
    summary = ""


class TestSaysNothing(TaskFamilyContract):
    fails = {"test_it_has_a_summary_of_one_line"}

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Mute()


class Empty(ChainedArithmetic):
    def tasks(self) -> Sequence[Task]:
        return ()


class TestHasNoTasks(TaskFamilyContract):
    fails = {"test_it_has_a_task"}

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Empty()


class Fresh(ChainedArithmetic):
    def tasks(self) -> Sequence[Task]:
        return [
            evolve(task, examples=tuple(self.items(task, random.Random(), 4, hidden=False))) for task in super().tasks()
        ]


class TestDrawsOtherExamplesEachTime(TaskFamilyContract):
    fails = {"test_tasks_are_the_same_every_time"}

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Fresh()


class Namesakes(ChainedArithmetic):
    def tasks(self) -> Sequence[Task]:
        return [evolve(task, id=self.name) for task in super().tasks()]


class TestGivesTwoTasksOneId(TaskFamilyContract):
    fails = {"test_task_ids_are_unique"}

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Namesakes()


class Foundling(ChainedArithmetic):
    def tasks(self) -> Sequence[Task]:
        return [evolve(task, family=type(self).__name__) for task in super().tasks()]


class TestNamesItsClass(TaskFamilyContract):
    fails = {"test_a_task_names_its_family"}

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Foundling()


class Tupled(ChainedArithmetic):
    def tasks(self) -> Sequence[Task]:
        return [evolve(task, parameters={**task.parameters, "range": (2, 3)}) for task in super().tasks()]


class TestHasTuplesAmongItsParameters(TaskFamilyContract):
    fails = {"test_a_task_survives_the_store"}

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Tupled()


class Leaking(ChainedArithmetic):
    def tasks(self) -> Sequence[Task]:
        return [
            evolve(task, examples=tuple(self.items(task, random.Random(0), 4, hidden=True))) for task in super().tasks()
        ]


class TestShowsHiddenItems(TaskFamilyContract):
    fails = {"test_every_task_has_public_examples"}

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Leaking()


class Bare(ChainedArithmetic):
    def tasks(self) -> Sequence[Task]:
        return [evolve(task, examples=()) for task in super().tasks()]


class TestShowsNoExamples(TaskFamilyContract):
    fails = {"test_every_task_has_public_examples"}

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Bare()


class Dressed(ChainedArithmetic):
    def tasks(self) -> Sequence[Task]:
        return [
            evolve(task, examples=tuple(evolve(item, prompt=f"Q: {item.prompt}") for item in task.examples))
            for task in super().tasks()
        ]


class TestWritesExamplesAnotherWay(TaskFamilyContract):
    fails = {"test_examples_are_items_of_the_family"}

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Dressed()


class Batched(ChainedArithmetic):
    def items(self, task: Task, rng: random.Random, n: int, *, hidden: bool) -> list[Item]:
        return super().items(task, rng, (n + 7) // 8 * 8, hidden=hidden)


class TestGivesWholeBatches(TaskFamilyContract):
    fails = {"test_items_are_as_many_as_asked_for"}

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Batched()


class Replacing(ChainedArithmetic):
    def tasks(self) -> Sequence[Task]:
        return [evolve(task, parameters={"low": 1, "high": 1}) for task in super().tasks()]

    def items(self, task: Task, rng: random.Random, n: int, *, hidden: bool) -> list[Item]:
        return [self.draw_class(rng, 1, 1, hidden=hidden) for _ in range(n)]


class TestDrawsWithReplacement(TaskFamilyContract):
    fails = {"test_item_keys_are_distinct"}

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Replacing()


class Public(ChainedArithmetic):
    def items(self, task: Task, rng: random.Random, n: int, *, hidden: bool) -> list[Item]:
        return super().items(task, rng, n, hidden=False)


class TestNeverHides(TaskFamilyContract):
    fails = {"test_hidden_items_are_of_the_hidden_class"}

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Public()


class Unaware(ChainedArithmetic):
    # the classes by depth, which `reserved` knows nothing of
    def items(self, task: Task, rng: random.Random, n: int, *, hidden: bool) -> list[Item]:
        found: dict[str, Item] = {}
        while len(found) < n:
            item = self.draw(rng, 4 if hidden else 3)
            found[item.key] = item
        return list(found.values())


class TestDoesNotKnowTheRule(TaskFamilyContract):
    fails = {
        "test_hidden_items_are_of_the_hidden_class",
        "test_other_items_are_not_of_the_hidden_class",
    }

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Unaware()


class Own(ChainedArithmetic):
    def __init__(self) -> None:
        self._rng = random.Random(0)

    def items(self, task: Task, rng: random.Random, n: int, *, hidden: bool) -> list[Item]:
        return super().items(task, self._rng, n, hidden=hidden)


class TestDrawsFromItsOwnGenerator(TaskFamilyContract):
    fails = {
        "test_the_same_generator_state_gives_the_same_items",
        "test_tasks_are_the_same_every_time",
    }

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Own()


class Sparing(ChainedArithmetic):
    def __init__(self) -> None:
        self._served: set[str] = set()

    def items(self, task: Task, rng: random.Random, n: int, *, hidden: bool) -> list[Item]:
        items = super().items(task, rng, n + len(self._served), hidden=hidden)
        new = [item for item in items if item.key not in self._served][:n]
        self._served |= {item.key for item in new}
        return new


class TestNeverRepeatsItself(TaskFamilyContract):
    fails = {
        "test_the_same_generator_state_gives_the_same_items",
        "test_tasks_are_the_same_every_time",
    }

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Sparing()


class Seeding(ChainedArithmetic):
    def items(self, task: Task, rng: random.Random, n: int, *, hidden: bool) -> list[Item]:
        random.seed(rng.random())
        return super().items(task, random._inst, n, hidden=hidden)  # type: ignore[attr-defined]


class TestSeedsTheGlobalGenerator(TaskFamilyContract):
    fails = {"test_the_global_generator_is_left_alone"}

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Seeding()


class Numbered(ChainedArithmetic):
    def items(self, task: Task, rng: random.Random, n: int, *, hidden: bool) -> list[Item]:
        items = super().items(task, rng, n, hidden=hidden)
        return [evolve(item, answer=f"{index}: {item.answer}") for index, item in enumerate(items)]


class TestNumbersItsItems(TaskFamilyContract):
    fails = {
        "test_a_prompt_is_read_back",
        "test_examples_are_items_of_the_family",
    }

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Numbered()


class Literal(ChainedArithmetic):
    def item(self, prompt: str) -> Item | None:
        words = prompt.split()
        if words and any(word.isdigit() and int(word) > 9 for word in words):
            return None
        return super().item(prompt)


class TestReadsDigitsAnyhow(TaskFamilyContract):
    fails = {"test_reading_raises_on_no_text"}

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Literal()


class Greedy(ChainedArithmetic):
    def item(self, prompt: str) -> Item | None:
        return super().item(prompt) or Item(prompt, "0", ("0",), prompt)


class TestReadsAnything(TaskFamilyContract):
    fails = {"test_foreign_text_is_no_item"}

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Greedy()


class Curt(ChainedArithmetic):
    def gold(self, item: Item) -> str:
        return item.answer


class TestLeavesTheMarkOutOfItsGold(TaskFamilyContract):
    fails = {
        "test_gold_scores_one",
        "test_gold_has_full_partial_credit",
    }

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Curt()


class Stern(ChainedArithmetic):
    def partial(self, item: Item, reply: str) -> float:
        said = reply.split("so")[0].split()
        return 0.5 * sum(a == b for a, b in zip(said, item.steps, strict=False)) / len(item.steps)


class TestPaysStepsAlone(TaskFamilyContract):
    fails = {
        "test_gold_has_full_partial_credit",
        "test_partial_credit_is_at_least_the_score",
    }

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Stern()


class Strict(ChainedArithmetic):
    def partial(self, item: Item, reply: str) -> float:
        said = reply.split("so")[0].split()
        return sum(a == b for a, b in zip(said, item.steps, strict=False)) / len(item.steps)


class TestPaysNoAnswerWithoutItsSteps(TaskFamilyContract):
    fails = {"test_partial_credit_is_at_least_the_score"}

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Strict()


class Parsing(ChainedArithmetic):
    def score(self, item: Item, reply: str) -> float:
        return float(int(final_answer(reply) or "0") == int(item.answer) and "so" in reply)


class TestParsesTheReply(TaskFamilyContract):
    fails = {"test_metrics_take_any_text"}

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Parsing()


class Angry(ChainedArithmetic):
    def score(self, item: Item, reply: str) -> float:
        return super().score(item, reply) if reply.strip() else -1.0


class TestPunishesSilence(TaskFamilyContract):
    fails = {"test_metrics_are_in_the_unit_interval"}

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Angry()


class Moody(ChainedArithmetic):
    def __init__(self) -> None:
        self._rng = random.Random(0)

    def partial(self, item: Item, reply: str) -> float:
        exact = self.score(item, reply)
        return exact or 0.1 * self._rng.random()


class TestPaysByMood(TaskFamilyContract):
    fails = {"test_metrics_depend_on_item_and_reply_alone"}

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Moody()


class Prefix(ChainedArithmetic):
    def score(self, item: Item, reply: str) -> float:
        return float(item.answer.startswith(final_answer(reply) or ""))


class TestTakesABeginning(TaskFamilyContract):
    fails = {
        "test_an_empty_reply_is_not_right",
        "test_the_prompt_is_not_a_right_reply",
    }

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Prefix()


class Containing(ChainedArithmetic):
    def score(self, item: Item, reply: str) -> float:
        return float(item.answer in reply)


class TestTakesTheAnswerAnywhere(TaskFamilyContract):
    fails = {
        "test_the_prompt_is_not_a_right_reply",
        "test_a_list_of_answers_is_not_a_right_reply",
        "test_a_right_reply_to_another_item_is_not_right",
    }

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Containing()


class Generous(ChainedArithmetic):
    def score(self, item: Item, reply: str) -> float:
        return float(item.answer in (part.split()[0] for part in reply.split("so")[1:] if part.split()))


class TestTakesOneAnswerOfMany(TaskFamilyContract):
    fails = {"test_a_list_of_answers_is_not_a_right_reply"}

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Generous()


class Formal(ChainedArithmetic):
    def score(self, item: Item, reply: str) -> float:
        return float((final_answer(reply) or "x") in "0123456789")


class TestPaysForTheForm(TaskFamilyContract):
    fails = {
        "test_a_list_of_answers_is_not_a_right_reply",
        "test_a_right_reply_to_another_item_is_not_right",
    }

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Formal()


class Running(ChainedArithmetic):
    def items(self, task: Task, rng: random.Random, n: int, *, hidden: bool) -> list[Item]:
        found = {item.key: item for item in (self.draw_class(rng, 1, 1, hidden=hidden) for _ in range(10 * n))}
        return list(found.values())[:n]


class TestGivesFewerThanAsked(TaskFamilyContract):
    """Enough where there are many, as in every task of its own."""

    fails = {"test_too_few_distinct_items_are_an_error"}

    @pytest.fixture
    def family(self) -> TaskFamily:
        return Running()

    @pytest.fixture
    def dry(self, family: TaskFamily) -> tuple[Task, int]:
        return _task(1, 1), 100
