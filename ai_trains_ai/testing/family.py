"""What every family of tasks promises."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from ai_trains_ai.convert import from_json, to_json
from ai_trains_ai.errors import ConfigurationError
from ai_trains_ai.families.hidden import reserved
from ai_trains_ai.interfaces import TaskFamily
from ai_trains_ai.records import Item, Task

Metric = Callable[[Item, str], float]

PROSE = (
    "The quick brown fox jumps over the lazy dog.",
    "I can't solve this one, sorry.\n\nIs there anything else that I can help with?",
)
# what trips parsers: no text, control characters, half of a character, digits of other scripts, numbers too long
# for int(), numbers that are none, braces for str.format, and sheer length
JUNK = (
    "",
    " \n\t",
    "\x00\x1b[2J",
    "\ud800",
    "\u0663 \u00b2 \u4e09 \u202e\u0301",
    "9" * 5_000,
    "nan inf -1e999 1_0",
    "{} {0} %s \\1 (?P<",
    "lorem ipsum " * 2_000,
)


class TaskFamilyContract:
    """Subclass it and give your family.

    >>> class TestMyFamily(TaskFamilyContract):
    ...     @pytest.fixture
    ...     def family(self):
    ...         return MyFamily()

    Class attributes:
        sample: Items of either class that are drawn of each task.
        foreign: Texts that are no prompt of the family.
    """

    sample: int = 24
    foreign: Sequence[str] = (*PROSE, *JUNK)

    @pytest.fixture
    def family(self) -> TaskFamily:
        raise NotImplementedError("override the fixture 'family' and return your TaskFamily")

    @pytest.fixture
    def dry(self, family: TaskFamily) -> tuple[Task, int] | None:
        """A task and a number of items that it doesn't have; ``None`` where no task of the family is that small."""
        return None

    @pytest.fixture
    def items(self, family: TaskFamily) -> list[Item]:
        """Items of both classes of every task."""
        drawn = ((task, hidden) for task in family.tasks() for hidden in (False, True))
        return [item for task, hidden in drawn for item in self._draw(family, task, hidden)]

    # -------------------------------------------------------------------------------------- tasks

    def test_it_has_a_name(self, family: TaskFamily) -> None:
        assert isinstance(family.name, str), "name is the text that users and stored runs call the family by"
        assert family.name == family.name.strip() != "", "name is not empty, and has no blanks around it"

    def test_it_has_a_summary_of_one_line(self, family: TaskFamily) -> None:
        assert len(family.summary.strip().splitlines()) == 1, "summary is one line, shown in lists of families"

    def test_it_has_a_task(self, family: TaskFamily) -> None:
        assert family.tasks(), "tasks() gives at least one"

    def test_tasks_are_the_same_every_time(self, family: TaskFamily) -> None:
        assert list(family.tasks()) == list(family.tasks()), "a resumed run asks tasks() again and must find its own"

    def test_task_ids_are_unique(self, family: TaskFamily) -> None:
        ids = [task.id for task in family.tasks()]
        assert len(set(ids)) == len(ids), "scores and baselines are kept by the task's id"

    def test_a_task_names_its_family(self, family: TaskFamily) -> None:
        for task in family.tasks():
            assert task.family == family.name, f"{task.id}: Task.family is the family's name; it is found again by it"

    def test_a_task_survives_the_store(self, family: TaskFamily) -> None:
        for task in family.tasks():
            stored = from_json(to_json(task), Task)
            assert stored == task, f"{task.id}: Task.parameters hold JSON values (lists, not tuples or sets)"

    def test_every_task_has_public_examples(self, family: TaskFamily) -> None:
        for task in family.tasks():
            assert task.examples, f"{task.id}: the agent is shown examples; give some"
            hidden = [item for item in task.examples if reserved(item.key)]
            assert not hidden, f"{task.id}: an example is public; draw it with items(..., hidden=False)"

    def test_examples_are_items_of_the_family(self, family: TaskFamily) -> None:
        for task in family.tasks():
            for example in task.examples:
                assert _read(family, example) == (example.key, example.answer), (
                    f"{task.id}: item(example.prompt) gives the example's own key and answer"
                )

    # -------------------------------------------------------------------------------------- items

    def test_items_are_as_many_as_asked_for(self, family: TaskFamily) -> None:
        for task in family.tasks():
            for n in (1, self.sample):
                items = family.items(task, random.Random(n), n, hidden=True)
                assert len(items) == n, f"{task.id}: items(task, rng, {n}) gives {n} items"

    def test_item_keys_are_distinct(self, family: TaskFamily) -> None:
        for task in family.tasks():
            for hidden in (False, True):
                keys = [item.key for item in self._draw(family, task, hidden)]
                assert len(set(keys)) == len(keys), f"{task.id}: two of the items ask the same thing (same key)"

    def test_hidden_items_are_of_the_hidden_class(self, family: TaskFamily) -> None:
        for task in family.tasks():
            public = [item.key for item in self._draw(family, task, True) if not reserved(item.key)]
            assert not public, f"{task.id}: hidden=True gives items alone whose key is reserved()"

    def test_other_items_are_not_of_the_hidden_class(self, family: TaskFamily) -> None:
        for task in family.tasks():
            hidden = [item.key for item in self._draw(family, task, False) if reserved(item.key)]
            assert not hidden, f"{task.id}: hidden=False gives no item whose key is reserved()"

    def test_the_same_generator_state_gives_the_same_items(self, family: TaskFamily) -> None:
        for task in family.tasks():
            for hidden in (False, True):
                first = self._draw(family, task, hidden)
                family.items(task, random.Random(1), self.sample, hidden=hidden)
                assert self._draw(family, task, hidden) == first, f"{task.id}: all randomness comes from rng"

    def test_the_global_generator_is_left_alone(self, family: TaskFamily) -> None:
        before = random.getstate()
        try:
            random.seed("a state that no family sets")
            mine = random.getstate()
            for task in family.tasks():
                for item in self._draw(family, task, True)[:4]:
                    reply = family.gold(item)
                    family.item(item.prompt), family.score(item, reply), family.partial(item, reply)
            assert random.getstate() == mine, "draw from the generator that is passed in, and seed no other"
        finally:
            random.setstate(before)

    def test_too_few_distinct_items_are_an_error(self, family: TaskFamily, dry: tuple[Task, int] | None) -> None:
        if dry is None:
            pytest.skip("the fixture 'dry' names no task that is small enough")
        task, n = dry
        with pytest.raises(ConfigurationError):
            family.items(task, random.Random(0), n, hidden=True)

    # -------------------------------------------------------------------------------------- reading

    def test_a_prompt_is_read_back(self, family: TaskFamily, items: list[Item]) -> None:
        for item in items:
            assert _read(family, item) == (item.key, item.answer), (
                f"item({item.prompt!r}) gives the key and the answer of the item that has this prompt"
            )

    def test_reading_raises_on_no_text(self, family: TaskFamily, items: list[Item]) -> None:
        raised = {}
        mangled = [text for item in items[:2] for text in _mangled(item.prompt)]
        for text in (*self.foreign, *mangled):
            try:
                family.item(text)
            except Exception as error:
                raised[text[:60]] = repr(error)
        assert not raised, "item() gets prompts that an agent wrote; give None for what isn't one"

    def test_foreign_text_is_no_item(self, family: TaskFamily) -> None:
        read = {}
        for text in self.foreign:
            try:
                item = family.item(text)
            except Exception:
                continue  # said by the test above
            if item is not None:
                read[text[:60]] = item
        assert not read, "item() gives None for text that is no prompt of the family"

    # -------------------------------------------------------------------------------------- metrics

    def test_gold_scores_one(self, family: TaskFamily, items: list[Item]) -> None:
        for item in items:
            assert family.score(item, family.gold(item)) == 1, f"score() gives gold() exactly 1 on {item.prompt!r}"

    def test_gold_has_full_partial_credit(self, family: TaskFamily, items: list[Item]) -> None:
        for item in items:
            assert family.partial(item, family.gold(item)) == 1, f"partial() gives gold() exactly 1 on {item.prompt!r}"

    def test_metrics_take_any_text(self, family: TaskFamily, items: list[Item]) -> None:
        raised = {}
        for metric in (family.score, family.partial):
            for item, reply in _replies(family, items):
                try:
                    metric(item, reply)
                except Exception as error:
                    raised[metric.__name__, reply[:60]] = repr(error)
        assert not raised, "a model replies anything; what is no answer scores 0"

    def test_metrics_are_in_the_unit_interval(self, family: TaskFamily, items: list[Item]) -> None:
        for metric in (family.score, family.partial):
            for item, reply in _replies(family, items):
                value = _measure(metric, item, reply)
                assert value is None or 0 <= value <= 1, f"{metric.__name__} of {reply[:60]!r} is in [0, 1]"

    def test_partial_credit_is_at_least_the_score(self, family: TaskFamily, items: list[Item]) -> None:
        for item, reply in _replies(family, items):
            score, partial = _measure(family.score, item, reply), _measure(family.partial, item, reply)
            if score is not None and partial is not None:
                assert not partial < score, f"partial() gives {reply[:60]!r} at least what score() gives"

    def test_metrics_depend_on_item_and_reply_alone(self, family: TaskFamily, items: list[Item]) -> None:
        for metric in (family.score, family.partial):
            pairs = list(_replies(family, items))
            first = [repr(_measure(metric, item, reply)) for item, reply in pairs]
            again = [repr(_measure(metric, item, reply)) for item, reply in reversed(pairs)]
            assert first == again[::-1], f"{metric.__name__} gives the same reply the same value, in any order"

    def test_an_empty_reply_is_not_right(self, family: TaskFamily, items: list[Item]) -> None:
        self._is_not_right(family, items, lambda item, other: "")

    def test_the_prompt_is_not_a_right_reply(self, family: TaskFamily, items: list[Item]) -> None:
        self._is_not_right(family, items, lambda item, other: item.prompt)

    def test_a_list_of_answers_is_not_a_right_reply(self, family: TaskFamily, items: list[Item]) -> None:
        self._is_not_right(family, items, lambda item, other: f"{family.gold(item)}\n{family.gold(other)}")

    def test_a_right_reply_to_another_item_is_not_right(self, family: TaskFamily, items: list[Item]) -> None:
        self._is_not_right(family, items, lambda item, other: family.gold(other))

    def _draw(self, family: TaskFamily, task: Task, hidden: bool) -> list[Item]:
        return family.items(task, random.Random(0), self.sample, hidden=hidden)

    def _is_not_right(self, family: TaskFamily, items: list[Item], reply: Callable[[Item, Item], str]) -> None:
        for item in items:
            other = next((other for other in items if other.answer != item.answer), None)
            if other is None:
                pytest.skip("every item has the same answer")
            said = reply(item, other)
            assert _measure(family.score, item, said) != 1, (
                f"a model that says {said[:80]!r} to {item.prompt!r} has learned nothing; score() must not give it 1"
            )


def _read(family: TaskFamily, item: Item) -> tuple[str, str] | None:
    read = family.item(item.prompt)
    return (read.key, read.answer) if read else None


def _mangled(prompt: str) -> Iterator[str]:
    """Prompts that begin like one of the family."""
    for cut in range(1, len(prompt)):
        yield prompt[:cut]
    for number in ("9" * 5_000, "\u0663", "\u00b2", "-1", "0"):
        yield "".join(number if letter.isdigit() else letter for letter in prompt)
    yield prompt * 50


def _replies(family: TaskFamily, items: list[Item]) -> Iterator[tuple[Item, str]]:
    """Replies of every sort, to a few items."""
    for item in items[:: max(1, len(items) // 6)]:
        gold = family.gold(item)
        for reply in (*PROSE, *JUNK, gold, gold + gold, gold[::-1], gold[:-1], gold + " x", item.prompt, item.answer):
            yield item, reply
        for text in JUNK:
            yield item, gold + text
            yield item, text + gold


def _measure(metric: Metric, item: Item, reply: str) -> float | None:
    """The value, where there is one: that there always is, is said by a test of its own."""
    try:
        return metric(item, reply)
    except Exception:
        return None
