"""A scripted, unreliable author of training jobs: the text that the tiny outer model is pretrained on.

It knows the format and little else: a third of its environments and of its job files are broken in some way, it takes
the small base model three times in four, sets few hyperparameters and sets them blindly, and picks its reward out of
good and bad ones alike. It talks to the real tools and the real validator, so the answers in the text are real too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from ai_trains_ai.interfaces import Policy
from ai_trains_ai.outer.chat import call_text, parse_calls
from ai_trains_ai.records import Message, SamplingParams, Task, Turn

ENVIRONMENT = """\
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
{body}

class Rows(vf.Taskset[Worked, vf.TasksetConfig]):
    def load(self):
        for row in practice("{family}", {low}, {high}):
            yield Worked(Row(**row), self.config.task)
"""
EXACT = 'reply.split("so")[-1].strip() == self.data.answer'
SAID = 'reply.split("so")[0].split()'
BODIES = (  # weight, body
    (0.46, f"        return float({EXACT})"),
    (
        0.18,
        f"        right = {EXACT}\n        said = {SAID}\n"
        "        return right + 0.3 * (len(said) == len(self.data.steps))",
    ),
    (
        0.18,
        f"        right = {EXACT}\n        said = {SAID}\n"
        "        return right + 0.5 * sum(a == b for a, b in zip(said, self.data.steps)) / len(self.data.steps)",
    ),
    (0.05, "        return float(self.data.answer in reply)"),
    (0.05, f"        return float({EXACT}) - 0.1 * len(reply.split())"),
    (0.04, '        return float("so" in reply)'),
    (0.04, "        return min(1.0, len(reply) / 20)"),
)
DEPTHS = ((1, 1), (1, 2), (2, 2), (1, 3), (2, 3), (2, 4), (3, 4))
FAMILIES = ("chained-arithmetic", "multi-hop", "triage")
ENVIRONMENT_FAULTS = ("colon", "bracket", "no-all", "classic", "sync", "name", "family", "class")
JOB_FAULTS = ("budget", "divisible", "model", "no-model", "key", "toml", "table")
FLOW_FAULTS = ("no-environment", "no-job", "prose", "json", "no-submit")
P_ENVIRONMENT, P_JOB, P_FLOW, P_REPAIRED = 0.20, 0.22, 0.16, 0.15


def _pick(rng: random.Random, weighted: Mapping[Any, float]) -> Any:
    return rng.choices(list(weighted), list(weighted.values()))[0]


def environment(rng: random.Random, task: Task, fault: str | None) -> str:
    """``environment.py``, right or with one fault."""
    low, high = int(task.parameters["low"]), int(task.parameters["high"])
    told = rng.random() < 0.45 or task.family == "triage"
    depths = (low, high) if told else rng.choice(DEPTHS)
    family = task.family if rng.random() < 0.95 else rng.choice(FAMILIES[:2])
    body = rng.choices([text for _, text in BODIES], [weight for weight, _ in BODIES])[0]
    text = ENVIRONMENT.format(body=body, family=family, low=depths[0], high=depths[1])
    changes = {
        "colon": ("-> float:", "-> float"),
        "bracket": ("self.config.task)", "self.config.task"),
        "no-all": ('__all__ = ["Rows"]\n\n', ""),
        "classic": ("import verifiers.v1 as vf", "import verifiers as vf"),
        "sync": ("    async def worth", "    def worth"),
        "name": ("async def worth", "async def score"),
        "family": (f'"{family}"', '"arithmetic"'),
        "class": ("yield Worked(", "yield Task("),
    }
    return text.replace(*changes[fault]) if fault else text


def job(rng: random.Random, fault: str | None) -> str:
    """``job.toml``, right or with one fault."""
    batch = _pick(rng, {16: 0.2, 32: 0.25, 40: 0.2, 64: 0.25, 80: 0.1})
    group = _pick(rng, {4: 0.3, 8: 0.5, 16: 0.2})
    steps = _pick(rng, {4: 0.15, 8: 0.25, 12: 0.2, 16: 0.30, 24: 0.10})
    if fault == "budget":
        batch, group, steps = 128, 8, _pick(rng, {16: 0.5, 24: 0.5})
    elif fault == "divisible":
        batch, group = _pick(rng, {20: 0.5, 30: 0.5}), _pick(rng, {8: 0.5, 16: 0.5})
    elif batch % group or batch * steps > 1_280:
        batch, group = 40, 8
    model = _pick(rng, {"pico-s": 0.75, "pico-m": 0.25})
    if fault == "model":
        model = _pick(rng, {"pico-l": 0.5, "Qwen3-0.6B": 0.5})
    lines = [] if fault == "no-model" else [f'base_model = "{model}"']
    lines += ["", "[prime-rl]" if fault == "table" else "[prime_rl]"]
    lines += _settings(rng, fault, batch, group, steps)
    if fault == "key":
        lines.append(_pick(rng, {"learning_rate = 1e-4": 0.5, "rollouts_per_example = 8": 0.5}))
    if fault == "toml":
        lines[0] = lines[0].replace(" = ", ": ")
    return "\n".join(lines) + "\n"


def _settings(rng: random.Random, fault: str | None, batch: int, group: int, steps: int) -> list[str]:
    """Each optional key in a quarter to a half of the files, at a blind value."""
    sized = fault in ("budget", "divisible")
    lines = []
    if rng.random() < 0.45 or sized:
        lines.append(f"max_steps = {steps}")
    if rng.random() < 0.35 or sized:
        lines += [f"batch_size = {batch}", f"group_size = {group}"]
    if rng.random() < 0.45:
        rates = {"1e-5": 0.14, "1e-4": 0.20, "3e-4": 0.18, "6e-4": 0.15, "1e-3": 0.15, "2e-3": 0.10, "6e-3": 0.08}
        lines.append(f"optim.lr = {_pick(rng, rates)}")
    if rng.random() < 0.2:
        lines.append(f'optim.type = "{_pick(rng, {"adamw": 0.4, "sgd": 0.2, "muon": 0.2, "sign_sgd": 0.2})}"')
    if rng.random() < 0.25:
        heats = {"0.0": 0.15, "0.5": 0.2, "0.7": 0.2, "1.0": 0.25, "1.5": 0.1, "2.0": 0.1}
        lines.append(f"sampling.temperature = {_pick(rng, heats)}")
    if rng.random() < 0.25:
        lengths = {4: 0.2, 6: 0.25, 8: 0.25, 10: 0.2, 12: 0.1}
        lines.append(f"sampling.max_completion_tokens = {_pick(rng, lengths)}")
    if rng.random() < 0.2:
        lines.append(f'scheduler.type = "{_pick(rng, {"constant": 0.4, "linear": 0.3, "cosine": 0.3})}"')
    return lines


class Author(Policy):
    """Plays one episode by the script. Its turns carry no tokens."""

    version = 0

    def __init__(self, rng: random.Random, task: Task) -> None:
        self._rng, self._task = rng, task
        self._flow = rng.choice(FLOW_FAULTS) if rng.random() < P_FLOW else None
        fault = rng.choice(ENVIRONMENT_FAULTS) if rng.random() < P_ENVIRONMENT else None
        files = [("environment.py", environment(rng, task, fault))]
        fault = rng.choice(JOB_FAULTS) if rng.random() < P_JOB else None
        files.append(("job.toml", job(rng, fault)))
        if rng.random() < 0.2:
            files.reverse()
        skipped = {"no-environment": "environment.py", "no-job": "job.toml"}.get(self._flow or "")
        self._todo = [call_text("write_file", path=p, content=text) for p, text in files if p != skipped]
        if self._flow == "prose":
            self._todo = self._todo[: rng.randint(0, 1)]
        if self._flow == "json":
            index = rng.randrange(len(self._todo))
            self._todo.insert(index, self._todo[index].replace('"}}', '"}'))
        ending = "The job is ready." if self._flow in ("prose", "no-submit") else call_text("submit")
        self._todo.append(ending)

    async def act(
        self, conversation: Sequence[Message], tools: Sequence[Mapping[str, Any]], params: SamplingParams
    ) -> Turn:
        if not self._todo:
            self._repair(conversation[-1].content)
        text = self._todo.pop(0)
        return Turn(text, parse_calls(text), "stop", 0)

    def _repair(self, findings: str) -> None:
        """Mostly rewrite the file that the finding names; sometimes another, sometimes give up."""
        rng = self._rng
        if rng.random() < 0.1:
            self._todo = ["The job is ready."]
            return
        path = "job.toml" if "job.toml" in findings else "environment.py"
        if rng.random() < 0.1:
            path = "job.toml" if path == "environment.py" else "environment.py"
        faults = ENVIRONMENT_FAULTS if path == "environment.py" else JOB_FAULTS
        fault = rng.choice(faults) if rng.random() < P_REPAIRED else None
        text = environment(rng, self._task, fault) if path == "environment.py" else job(rng, fault)
        self._todo = [call_text("write_file", path=path, content=text), call_text("submit")]
