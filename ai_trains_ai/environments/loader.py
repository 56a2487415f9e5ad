"""Load an agent's ``environment.py``: one verifiers taskset, at most one environment of its own, and its task rows.

Everything that can be wrong is an `InvalidEnvironment` with a code and a hint that lets an agent repair it.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from attrs import define, field

from ai_trains_ai.environments.versions import require_verifiers
from ai_trains_ai.errors import InvalidEnvironment

require_verifiers()

import verifiers.v1 as vf  # noqa: E402
from pydantic import ValidationError  # noqa: E402
from verifiers.v1.utils.generic import concrete_type  # noqa: E402

MODULE = "environment"
MAX_ROWS = 4096
MAX_ROW_BYTES = 64 << 10
MAX_BYTES = 8 << 20
# The agent may not choose them: which taskset runs is ours, and the others read files, load code or call services.
_LOCKED = ("id", "system_prompt")
_LOCKED_OF_TASK = ("judges", "metrics", "rewards", "stops")


@define
class LoadedEnvironment:
    """An agent's environment, ready to give tasks.

    Attributes:
        taskset: The one taskset of the module.
        env: The module's own environment (multi-turn), or ``None`` for the single-turn default.
    """

    taskset: vf.Taskset
    env: vf.Env | None
    _example: vf.Task | None = field(default=None, init=False)

    @property
    def multi_turn(self) -> bool:
        """Whether the module brings an environment of its own."""
        return self.env is not None

    @property
    def reward_weights(self) -> dict[str, float]:
        """Weight of each reward, by name."""
        return {hook.__name__: float(getattr(hook, "_vf_weight", 1.0)) for hook in self.example().hooks("reward")}

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics."""
        return tuple(hook.__name__ for hook in self.example().hooks("metric"))

    def example(self) -> vf.Task:
        """Some task of the taskset."""
        if self._example is None:
            self._example = next(self._tasks())
        return self._example

    def rows(self) -> list[str]:
        """Every task's data as JSON, in load order, after two calls of ``load()`` that agree.

        Raises:
            InvalidEnvironment: ``load()`` fails, gives too much, or its data isn't plain and repeatable.
        """
        rows: list[str] = []
        first: list[Any] = []
        total = 0
        for index, task in enumerate(itertools.islice(self._tasks(), MAX_ROWS + 1)):
            if index == MAX_ROWS:
                raise InvalidEnvironment("too-many-rows", f"load() gives more than {MAX_ROWS} tasks.", "Give fewer.")
            row = _row(task, index)
            total += len(row)
            if len(row) > MAX_ROW_BYTES or total > MAX_BYTES:
                raise InvalidEnvironment("rows-too-big", f"Task {index} or all tasks are too big.", "Give less data.")
            self._example = self._example or task
            rows.append(row)
            first.append(task.data)
        if [task.data for task in itertools.islice(self._tasks(), MAX_ROWS)] != first:
            hint = "Use random.Random(0)."
            raise InvalidEnvironment("rows-change", "load() gives other tasks each time.", hint)
        return rows

    def tasks_from_rows(self, rows: Sequence[str]) -> list[vf.Task]:
        """Tasks of frozen rows, without calling ``load()``. Raises `InvalidEnvironment`."""
        task_type = type(self.taskset).task_type()
        config = self.taskset.config.task
        try:
            tasks = [task_type(task_type.data_type().model_validate_json(row), config) for row in rows]
        except (ValidationError, TypeError) as error:
            raise InvalidEnvironment("row-not-json", f"A row can't be read back: {_short(error)}") from error
        if self._example is None and tasks:
            self._example = tasks[0]
        return tasks

    def _tasks(self) -> Iterator[vf.Task]:
        if type(self.taskset).INFINITE:
            raise InvalidEnvironment("infinite", "The taskset is infinite.", "Let load() end.")
        expected = type(self.taskset).task_type()
        empty = True
        with _agent_code("load-error", "load() raises"):
            for task in self.taskset:
                if type(task) is not expected:
                    raise InvalidEnvironment(
                        "task-type",
                        f"load() gives {type(task).__name__}, the taskset is declared for {expected.__name__}.",
                        "Declare class Rows(vf.Taskset[YourTask, vf.TasksetConfig]).",
                    )
                if task.data.prompt is None and self.env is None:
                    raise InvalidEnvironment("no-prompt", "A task has no prompt.", "Set prompt in every row.")
                empty = False
                yield task
        if empty:
            raise InvalidEnvironment("no-rows", "load() gives no task.", "Yield at least 8 tasks.")


def load_environment(folder: str | Path, environment_config: Mapping[str, Any] | None = None) -> LoadedEnvironment:
    """Import ``environment.py`` of ``folder`` and build its taskset from the ``[environment]`` table.

    Raises:
        InvalidEnvironment: The module, its classes or the table can't be used.
        MissingDependency: verifiers is absent or of another version.
    """
    module = _import_module(Path(folder).resolve())
    taskset_type = _exported(module, vf.Taskset)
    env_type = _exported(module, vf.Env)
    if taskset_type is None:
        raise InvalidEnvironment(
            "no-taskset", "__all__ names no Taskset.", '__all__ = ["Rows"] must name your Taskset.'
        )
    config = _config(taskset_type, dict(environment_config or {}))
    if env_type is None:
        with _agent_code("load-error", "The taskset can't be built"):
            return LoadedEnvironment(taskset_type(config), None)
    with _agent_code("load-error", "The environment can't be built"):
        env = _build_env(env_type, config)
    return LoadedEnvironment(env.taskset, env)


def _import_module(folder: Path) -> ModuleType:
    path = folder / f"{MODULE}.py"
    if not path.is_file():
        raise InvalidEnvironment("no-environment", "There is no environment.py.", "Write environment.py.")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # for the agent's own helper modules
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module  # pydantic and verifiers look names up here
    with _agent_code("import-error", "environment.py can't be imported"):
        spec.loader.exec_module(module)
    return module


def _exported(module: ModuleType, base: type) -> type[Any] | None:
    names = getattr(module, "__all__", None)
    if not isinstance(names, list | tuple):
        raise InvalidEnvironment("no-all", "environment.py has no __all__.", 'Add __all__ = ["Rows"].')
    found = [
        value
        for value in (getattr(module, name, None) for name in names if isinstance(name, str))
        if isinstance(value, type) and issubclass(value, base) and value is not base
    ]
    if len(found) > 1:
        kind = base.__name__
        raise InvalidEnvironment(f"many-{kind.lower()}s", f"__all__ names {len(found)} {kind}s.", "Name exactly one.")
    return found[0] if found else None


def _config(taskset_type: type[Any], table: dict[str, Any]) -> Any:
    config_type = concrete_type(taskset_type, vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig
    for place in _locked(table, "environment", _LOCKED):
        name = place.removeprefix("environment.")
        raise InvalidEnvironment("environment-config", f"{name} can't be set.", "Remove it.", place)
    try:
        return config_type.model_validate({"id": MODULE, **table})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, ("environment", *first["loc"])))
        if first["type"] == "extra_forbidden":
            known = sorted(set(config_type.model_fields) - set(vf.TasksetConfig.model_fields))
            hint = f"Fields: {', '.join(known)}." if known else "The config has no fields of its own."
            raise InvalidEnvironment("environment-config", "Unknown field.", hint, place) from None
        raise InvalidEnvironment("environment-config", f"{first['msg']}.", "Correct the value.", place) from None


def _locked(table: Mapping[str, Any], place: str, names: Sequence[str]) -> Iterator[str]:
    """Where a table, or one in it, sets what is not the agent's."""
    yield from (f"{place}.{name}" for name in names if name in table)
    for name, inner in table.items():
        if isinstance(inner, Mapping):
            yield from _locked(inner, f"{place}.{name}", _LOCKED_OF_TASK if name == "task" else ())


def _build_env(env_type: type[Any], config: Any) -> vf.Env:
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import resolve_env_config

    table = {
        "taskset": config.model_dump(exclude_unset=True) | {"id": MODULE},
        "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
    }
    env = env_type(resolve_env_config(table))
    if list(agent_config_fields(env.config)) != ["agent"]:
        raise InvalidEnvironment("many-agents", "The Env has several agents.", "Derive it from vf.SingleAgentEnv.")
    return env


_BASE_FIELDS = vf.TaskData.model_fields
_BASE_DEFAULTS = {name: value for name, value in vf.TaskData().model_dump(mode="json").items() if name != "prompt"}
_JSON_HINT = "Use str, int, float, bool, list and dict fields only."


def _row(task: vf.Task, index: int) -> str:
    """The task's data as JSON text, checked to survive the way there and back."""
    place = f"task {index}"
    fields = type(task.data).model_fields
    try:
        data = task.data.model_dump(mode="json")
        slim = {
            name: value
            for name, value in data.items()
            if not (
                name in _BASE_DEFAULTS
                and value == _BASE_DEFAULTS[name]
                and fields[name].default == _BASE_FIELDS[name].default
            )
        }
        text = json.dumps(slim, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
        again = type(task).data_type().model_validate_json(text)
        same = again == task.data
    except Exception as error:
        raise InvalidEnvironment("row-not-json", f"The data is no JSON: {_short(error)}", _JSON_HINT, place) from error
    if not same:
        raise InvalidEnvironment("row-not-json", "The data changes on the way through JSON.", _JSON_HINT, place)
    try:
        vf.WireTaskData.model_validate_json(text)  # where agent code is not run, its own type of data isn't known
    except ValueError as error:
        hint = "Give your fields other names than those of vf.TaskData, or the same types."
        message = f"The data is no vf.TaskData: {_short(error)}"
        raise InvalidEnvironment("row-not-json", message, hint, place) from error
    return text


@contextmanager
def _agent_code(code: str, what: str) -> Iterator[None]:
    """Turn whatever the agent's code raises, ``sys.exit`` included, into an `InvalidEnvironment` with its line."""
    try:
        yield
    except (InvalidEnvironment, GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        place = place_of(error)
        if isinstance(error, ModuleNotFoundError) and error.name:
            hint = "Only verifiers, numpy and the standard library are there."
            raise InvalidEnvironment("missing-module", f"There is no module {error.name}.", hint, place) from error
        raise InvalidEnvironment(code, f"{what}: {_short(error)}", "Repair this line.", place) from error


def place_of(error: BaseException) -> str:
    """The innermost line of the agent's own code in a traceback, as ``environment.py:12``."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    source = getattr(sys.modules.get(MODULE), "__file__", None)
    if source is not None:
        root = str(Path(source).parent) + "/"
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if frame.filename.startswith(root):
                return f"{frame.filename.removeprefix(root)}:{frame.lineno}"
    return f"{MODULE}.py"


def _short(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0][:160]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
