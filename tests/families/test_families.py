"""What the built-in families share beyond the contract, and what each computes."""

from __future__ import annotations

import random
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ai_trains_ai.errors import ConfigurationError, UnknownName
from ai_trains_ai.families import BUILT_IN, load
from ai_trains_ai.families.hidden import CLASSES, reserved
from ai_trains_ai.families.worked import WorkedFamily, final_answer
from ai_trains_ai.records import Item, Task

FAMILIES = {name: load(name) for name in BUILT_IN}
TASKS = [(family, task) for family in FAMILIES.values() for task in family.tasks()]
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
every_task = pytest.mark.parametrize(("family", "task"), TASKS, ids=[task.id for _, task in TASKS])
seeds = st.integers(0, 2**32)


def test_the_five_tasks() -> None:
    assert [(task.id, dict(task.parameters)) for _, task in TASKS] == [
        ("chained-arithmetic-2-3", {"low": 2, "high": 3}),
        ("chained-arithmetic-3-4", {"low": 3, "high": 4}),
        ("multi-hop-2-3", {"low": 2, "high": 3}),
        ("multi-hop-2-4", {"low": 2, "high": 4}),
        ("triage", {"low": 2, "high": 2}),
    ]


@every_family
def test_a_family_is_registered_under_its_own_name(family: WorkedFamily) -> None:
    assert FAMILIES[family.name] is family


@every_task
def test_a_task_is_short_and_has_four_examples(family: WorkedFamily, task: Task) -> None:
    assert len(task.examples) == 4
    assert len(task.brief.split()) < 40
    assert "so" in task.brief.replace(",", "").split()


@every_task
@given(seed=seeds)
def test_classes_never_mix(family: WorkedFamily, task: Task, seed: int) -> None:
    public = family.items(task, random.Random(seed), 12, hidden=False)
    hidden = family.items(task, random.Random(seed), 12, hidden=True)
    assert not any(reserved(item.key) for item in public)
    assert all(reserved(item.key) for item in hidden)
    assert len({item.key for item in public}) == len({item.key for item in hidden}) == 12


@every_task
def test_items_span_the_depths_of_their_task(family: WorkedFamily, task: Task) -> None:
    depths = {len(item.steps) for item in family.items(task, random.Random(0), 60, hidden=True)}
    assert depths == set(range(task.parameters["low"], task.parameters["high"] + 1))


@every_task
def test_another_seed_gives_other_items(family: WorkedFamily, task: Task) -> None:
    first, other = (family.items(task, random.Random(seed), 8, hidden=True) for seed in (1, 2))
    assert first != other


@every_family
@given(seed=seeds)
def test_reading_a_prompt_gives_the_item_back(family: WorkedFamily, seed: int) -> None:
    rng = random.Random(seed)
    item = family.draw(rng, rng.randint(family.shallowest, family.deepest))
    assert family.item(item.prompt) == item
    assert family.item("  " + item.prompt.replace(" ", "  ") + "\n") == item
    assert family.item(item.prompt.removesuffix(" ->")) is None
    assert family.item(item.prompt + " more") is None
    others = (other for other in FAMILIES.values() if other is not family)
    assert all(other.item(item.prompt) is None for other in others)


@every_family
@given(text=st.text())
def test_other_text_is_not_read(family: WorkedFamily, text: str) -> None:
    assert family.item(text) is None


@every_family
@given(seed=seeds)
def test_gold_scores_one_and_no_reply_scores_outside_the_unit_interval(family: WorkedFamily, seed: int) -> None:
    rng = random.Random(seed)
    item, other = (family.draw(rng, family.deepest) for _ in range(2))
    assert family.score(item, family.gold(item)) == family.partial(item, family.gold(item)) == 1.0
    for reply in (family.gold(other), "", " so", " so so", " ".join(item.steps), f" so {item.answer} x"):
        assert 0.0 <= family.score(item, reply) <= family.partial(item, reply) <= 1.0


@every_family
@given(reply=st.text())
def test_any_text_can_be_scored(family: WorkedFamily, reply: str) -> None:
    item = family.draw(random.Random(0), family.deepest)
    assert 0.0 <= family.score(item, reply) <= family.partial(item, reply) <= 1.0


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (" 2 6 so 6", "6"),
        ("so 3 so  p2   data ", "p2 data"),
        ("also 6", None),
        ("6", None),
        ("so", ""),
        ("so, 6", ", 6"),
    ],
)
def test_the_answer_is_what_follows_the_last_so(reply: str, answer: str | None) -> None:
    assert final_answer(reply) == answer


def test_partial_credit_counts_steps_at_their_place() -> None:
    item = Item("start 7 add 5 times 3 ->", "6", ("2", "6"), "key")
    family = FAMILIES["chained-arithmetic"]
    assert [family.partial(item, reply) for reply in ("2 6 so 6", "2 6", "2 5 so 5", "6 2 so 2", "so 6", "")] == [
        1.0,
        0.5,
        0.25,
        0.0,
        1.0,
        0.0,
    ]


# ------------------------------------------------------------------------------------------------ each family


@pytest.mark.parametrize(
    ("prompt", "steps"),
    [
        ("start 7 add 5 times 3 ->", "2 6"),
        ("start 0 minus 1 ->", "9"),
        ("start 9 times 9 add 0 minus 9 ->", "1 1 2"),
    ],
)
def test_chained_arithmetic(prompt: str, steps: str) -> None:
    item = FAMILIES["chained-arithmetic"].item(prompt)
    assert item is not None
    assert (" ".join(item.steps), item.answer) == (steps, steps[-1])


@pytest.mark.parametrize(
    "prompt", ["start 7 ->", "start 12 add 5 ->", "start 7 plus 5 ->", "start 7 add five ->", "start ٣ add 5 ->"]
)
def test_chained_arithmetic_refuses(prompt: str) -> None:
    assert FAMILIES["chained-arithmetic"].item(prompt) is None


def test_multi_hop() -> None:
    item = FAMILIES["multi-hop"].item("k > a g > e e > k | g hop 2 ->")
    assert item is not None
    assert (item.steps, item.answer) == (("e", "k"), "k")


def test_multi_hop_key_ignores_the_order_of_edges() -> None:
    family = FAMILIES["multi-hop"]
    first, second = (family.item(f"{edges} | g hop 2 ->") for edges in ("g > e e > k", "e > k g > e"))
    assert first is not None
    assert second is not None
    assert first.key == second.key
    assert first.prompt != second.prompt


@pytest.mark.parametrize(
    "prompt", ["g > e e > k | g hop 3 ->", "g > e g > k | g hop 1 ->", "g > z | g hop 1 ->", "| g hop 1 ->"]
)
def test_multi_hop_refuses(prompt: str) -> None:
    assert FAMILIES["multi-hop"].item(prompt) is None


@pytest.mark.parametrize(
    ("prompt", "reply"),
    [
        ("alert prod eu db disk 83 ->", " mid data so p2 data"),
        ("alert prod us web disk 90 ->", " high edge so p1 edge"),
        ("alert test asia pay load 39 ->", " low core so p5 core"),
        ("alert stage eu mail errors 20 ->", " mid core so p3 core"),
    ],
)
def test_triage(prompt: str, reply: str) -> None:
    family = FAMILIES["triage"]
    item = family.item(prompt)
    assert item is not None
    assert family.gold(item) == reply


def test_triage_key_ignores_the_region() -> None:
    keys = {FAMILIES["triage"].item(f"alert prod {region} db disk 83 ->").key for region in ("eu", "us", "asia")}
    assert len(keys) == 1


@pytest.mark.parametrize("value", ["9", "09", "100", "5o", "٤٢"])
def test_triage_refuses(value: str) -> None:
    assert FAMILIES["triage"].item(f"alert prod eu db disk {value} ->") is None


# ------------------------------------------------------------------------------------------------ the hidden class


def test_one_item_in_eight_is_reserved() -> None:
    assert CLASSES == 8
    share = sum(reserved(f"key {number}") for number in range(16_000)) / 16_000
    assert share == pytest.approx(1 / 8, abs=0.01)


def test_the_rule_never_changes() -> None:
    """Published numbers depend on it."""
    assert [n for n in range(40) if reserved(f"key {n}")] == RESERVED


RESERVED = [15, 17, 22, 31, 39]


def _hidden_chains_of_two() -> int:
    family = FAMILIES["chained-arithmetic"]
    operations = [f"{name} {digit}" for name in ("add", "minus") for digit in range(1, 10)]
    operations += [f"times {digit}" for digit in range(2, 6)]
    prompts = (f"start {x} {a} {b} ->" for x in range(10) for a in operations for b in operations)
    items = [family.item(prompt) for prompt in prompts]
    assert len(items) == 4_840
    return sum(reserved(item.key) for item in items if item)


def test_the_smallest_hidden_space_has_several_hundred_items() -> None:
    """Chains of two; deeper chains, hops and alerts have thousands."""
    assert 550 < _hidden_chains_of_two() < 660
    rng = random.Random(0)
    for family, task in TASKS:
        assert len(family.items(task, rng, 1_500, hidden=True)) == 1_500


def test_the_size_of_triage() -> None:
    keys = {FAMILIES["triage"].draw(random.Random(seed), 2).key for seed in range(60_000)}
    assert 17_500 < len(keys) <= 19_440


def test_a_space_that_runs_dry_says_so() -> None:
    task = Task("x", "chained-arithmetic", "", "", {"low": 1, "high": 1})
    with pytest.raises(ConfigurationError, match="x has no 100 distinct hidden items; it ran dry at"):
        FAMILIES["chained-arithmetic"].items(task, random.Random(0), 100, hidden=True)


def test_unknown_family() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'multi-hop'"):
        load("multihop")


def test_drawn_items_are_of_both_classes() -> None:
    """Otherwise the tests above would say nothing of the filter."""
    for family in FAMILIES.values():
        rng = random.Random(0)
        drawn = list(islice(iter(lambda family=family, rng=rng: family.draw(rng, 2), None), 400))
        assert 20 < sum(reserved(item.key) for item in drawn) < 90
