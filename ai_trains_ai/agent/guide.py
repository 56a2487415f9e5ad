"""The guide in the agent's workspace: how to write an environment, what may be set, one worked job."""

from __future__ import annotations

from collections.abc import Sequence

from ai_trains_ai.records import BaseModel, ConfigSurface, Task

ENVIRONMENT = """\
# Writing environment.py

A verifiers v1 module (`import verifiers.v1 as vf`) with exactly one Taskset in `__all__`:

* a `vf.TaskData` subclass holds one row: `prompt` and whatever your rewards need (plain JSON values);
* a `vf.Task[Row]` subclass holds `@vf.reward` methods: `async def name(self, trace: vf.Trace) -> float`;
  `trace.last_reply` is the model's reply, `self.data` the row. Rewards must be finite;
* a `vf.Taskset[Task, vf.TasksetConfig]` subclass yields tasks from `load()`: finite, and the same on every load.

`from ai_trains_ai.families.practice import practice` gives public practice rows of a family:
`practice(family, low, high, n=128, seed=0)` returns mappings with prompt, answer and steps. A reply is scored by what
follows its last "so"; a worked reply gives the steps first.

`probes.jsonl` is optional, one object a line: `{"replies": ["..."], "min": 0.9}` or `{"replies": ["x"], "max": 0.1}`.
A right reply must be paid clearly more than an empty, a random and a wrong one, or the submission is refused.
"""

REFERENCE = """\
import verifiers.v1 as vf
from ai_trains_ai.families.practice import practice

__all__ = ["Rows"]


class Row(vf.TaskData):
    answer: str
    steps: list[str]


class Worked(vf.Task[Row]):
    @vf.reward
    async def worth(self, trace: vf.Trace) -> float:
        reply = trace.last_reply
        return float(reply.split("so")[-1].strip() == self.data.answer)


class Rows(vf.Taskset[Worked, vf.TasksetConfig]):
    def load(self):
        for row in practice("{family}", {low}, {high}):
            yield Worked(Row(**row), self.config.task)
"""


def guide_files(task: Task, models: Sequence[BaseModel], surface: ConfigSurface) -> dict[str, str]:
    """Read-only files by path. The worked job is one of another family than the task's."""
    other = ("multi-hop", 2, 2) if task.family != "multi-hop" else ("chained-arithmetic", 1, 2)
    family, low, high = other
    reference = REFERENCE.replace("{family}", family).replace("{low}", str(low)).replace("{high}", str(high))
    return {
        "guide/environment.md": ENVIRONMENT,
        "guide/config.md": config_markdown(models, surface),
        "guide/reference/environment.py": reference,
        "guide/reference/job.toml": f'base_model = "{models[0].name}"\n\n[prime_rl]\nmax_steps = 4\n',
    }


def config_markdown(models: Sequence[BaseModel], surface: ConfigSurface) -> str:
    """job.toml explained: one line a key, from the surface itself."""
    lines = [
        "# Writing job.toml",
        "",
        f"`base_model` is one of: {', '.join(model.name for model in models)}. `[environment]` sets fields of your",
        "Taskset's config. `[prime_rl]` sets hyperparameters; what you leave out keeps its default:",
        "",
    ]
    for key in surface.keys:
        bounds = "|".join(key.choices)
        if not bounds and (key.low is not None or key.high is not None):
            bounds = f"{'' if key.low is None else key.low} to {'' if key.high is None else key.high}".strip()
        kind = f"{key.type}{', ' + bounds if bounds else ''}; default {key.default}"
        lines.append(f"* `{key.path}` ({kind}): {key.help}{f'. {key.reason}' if key.reason else ''}")
    lines += ["", *(f"* refused: {rule.message}" for rule in surface.rules)]
    return "\n".join(lines) + "\n"
