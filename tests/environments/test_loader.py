"""Loading: what works, and a code with a place for everything that doesn't."""

import json

import pytest

from ai_trains_ai.errors import InvalidEnvironment

from .conftest import HEAD, REWARD, ROWS

GOOD = HEAD + REWARD + ROWS


def test_rows_come_in_load_order_as_slim_json(load):
    loaded = load(GOOD)
    rows = loaded.rows()
    assert [json.loads(row)["answer"] for row in rows] == [str(n) for n in range(1, 9)]
    assert json.loads(rows[3]) == {"idx": 3, "prompt": "3 plus 1", "answer": "4"}


def test_tasks_of_frozen_rows_equal_the_loaded_ones(load):
    loaded = load(GOOD)
    tasks = loaded.tasks_from_rows(loaded.rows())
    assert [task.data for task in tasks] == [task.data for task in loaded.taskset]
    assert [task.hash for task in tasks] == [task.hash for task in loaded.taskset]


def test_the_environment_table_reaches_the_config(load):
    source = (
        HEAD
        + REWARD
        + """
class Config(vf.TasksetConfig):
    n: int = 2
class Rows(vf.Taskset[Check, Config]):
    def load(self):
        return [Check(Row(prompt=str(i), answer=str(i)), self.config.task) for i in range(self.config.n)]
"""
    )
    assert len(load(source).rows()) == 2
    assert len(load(source, {"n": 5}).rows()) == 5


def test_weights_and_metrics_are_told(load):
    source = (
        HEAD
        + """
class Check(vf.Task[Row]):
    @vf.reward(weight=0.25)
    async def a(self, trace) -> float: return 1.0
    @vf.reward
    async def b(self, trace) -> float: return 1.0
    @vf.metric
    async def c(self, trace) -> float: return 1.0
"""
        + ROWS
    )
    loaded = load(source)
    assert loaded.reward_weights == {"a": 0.25, "b": 1.0}
    assert loaded.metric_names == ("c",)


def test_a_helper_module_of_the_agent_is_found(load):
    source = "from helper_of_agent import N\n" + GOOD.replace("range(8)", "range(N)")
    assert len(load(source, helper_of_agent="N = 3").rows()) == 3


def test_defaults_that_the_agent_changed_survive(load):
    source = GOOD.replace("    answer: str", "    answer: str\n    system_prompt: str | None = 'Be brief.'").replace(
        "answer=str(n + 1)", "answer=str(n + 1), system_prompt=None"
    )
    loaded = load(source)
    assert loaded.tasks_from_rows(loaded.rows())[0].data.system_prompt is None


BAD = {
    "no-all": GOOD.replace('__all__ = ["Rows"]', ""),
    "no-taskset": GOOD.replace('["Rows"]', '["Check"]'),
    "many-tasksets": GOOD.replace('["Rows"]', '["Rows", "More"]') + "\nclass More(Rows): pass\n",
    "import-error": "x = 1 / 0\n",
    "missing-module": "import no_such_package_x\n",
    "load-error": GOOD.replace("for n in range(8):", "for n in [1 / 0]:"),
    "no-rows": GOOD.replace("range(8)", "range(0)"),
    "no-prompt": GOOD.replace('prompt=f"{n} plus 1", ', ""),
    "too-many-rows": GOOD.replace("range(8)", "__import__('itertools').count()"),
    "rows-too-big": GOOD.replace("answer=str(n + 1)", "answer='x' * 100_000"),
    "infinite": GOOD.replace("def load", "INFINITE = True\n    def load"),
    "task-type": GOOD.replace("vf.Taskset[Check, vf.TasksetConfig]", "vf.Taskset"),
    "row-not-json": GOOD.replace("answer: str", "answer: str = vf_field(exclude=True)").replace(
        "import verifiers.v1 as vf", "import verifiers.v1 as vf\nfrom pydantic import Field as vf_field"
    ),
}


@pytest.mark.parametrize("code", BAD)
def test_a_bad_module_gives_its_code(code, load):
    with pytest.raises(InvalidEnvironment) as caught:
        load(BAD[code]).rows()
    assert caught.value.code == code
    assert len(caught.value.message) < 120


@pytest.mark.parametrize(
    ("value", "field"), [("float('nan')", "float"), ("object()", "object"), ("b'\\xff'", "bytes"), ("'\\ud800'", "str")]
)
def test_data_that_is_no_json_is_refused(value, field, load):
    source = GOOD.replace("answer: str", f"answer: {field}\n    model_config = {{'arbitrary_types_allowed': True}}")
    with pytest.raises(InvalidEnvironment) as caught:
        load(source.replace("answer=str(n + 1)", f"answer={value}")).rows()
    assert caught.value.code in ("row-not-json", "load-error")


def test_an_error_names_the_line(load):
    with pytest.raises(InvalidEnvironment) as caught:
        load("import math\n\nx = 1\ny = x / 0\n")
    assert (caught.value.code, caught.value.place) == ("import-error", "environment.py:4")
    with pytest.raises(InvalidEnvironment) as caught:
        load("import math\n\nx = (\n")
    assert caught.value.place == "environment.py:3"


def test_an_exit_at_import_is_an_error(load):
    with pytest.raises(InvalidEnvironment, match="SystemExit"):
        load("raise SystemExit(0)")


@pytest.mark.parametrize(
    ("table", "place", "said"),
    [
        ({"wrong": 1}, "environment.wrong", "Unknown field"),
        ({"task": {"wrong": 1}}, "environment.task.wrong", "Unknown field"),
        ({"id": "x"}, "environment.id", "can't be set"),
        ({"system_prompt": "/etc/passwd"}, "environment.system_prompt", "can't be set"),
        ({"task": {"judges": [{"id": "x"}]}}, "environment.task.judges", "task.judges can't be set"),
        ({"task": {"metrics": {"a": {"fn": "x.py:f"}}}}, "environment.task.metrics", "can't be set"),
        ({"task": {"rewards": {"a": {"fn": "x.py:f"}}}}, "environment.task.rewards", "can't be set"),
        ({"task": {"rewards": {"a": {"weight": 2.0}}}}, "environment.task.rewards", "can't be set"),
        ({"task": {"stops": {}}}, "environment.task.stops", "can't be set"),
        ({"easy": {"task": {"rewards": {}}}}, "environment.easy.task.rewards", "can't be set"),
    ],
)
def test_a_wrong_table_names_the_field(table, place, said, load):
    with pytest.raises(InvalidEnvironment, match=said) as caught:
        load(GOOD, table)
    assert (caught.value.code, caught.value.place) == ("environment-config", place)


def test_names_that_are_locked_in_one_table_are_free_in_another(load):
    source = GOOD.replace(
        "class Rows(vf.Taskset[Check, vf.TasksetConfig])",
        """class Config(vf.TasksetConfig):
    levels: dict[str, int] = {}
class Rows(vf.Taskset[Check, Config])""",
    )
    assert load(source, {"levels": {"id": 1, "stops": 2}}).taskset.config.levels == {"id": 1, "stops": 2}


def test_a_row_that_fits_no_task_is_refused(load):
    with pytest.raises(InvalidEnvironment) as caught:
        load(GOOD).tasks_from_rows(['{"prompt": "x"}'])
    assert caught.value.code == "row-not-json"


@pytest.mark.parametrize(
    "field", ["description: dict[str, int] = {'a': 1}", "name: int = 7", "workdir: list[str] = ['x']"]
)
def test_a_field_of_verifiers_with_another_type(field, load):
    """Validation's own type takes it; the trainer, which never runs agent code, does not know that type."""
    with pytest.raises(InvalidEnvironment, match=r"is no vf\.TaskData") as caught:
        load(GOOD.replace("answer: str", f"answer: str\n    {field}", 1)).rows()
    assert caught.value.code == "row-not-json"
    assert "other names" in caught.value.hint
