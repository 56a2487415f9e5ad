"""A validator over a real sandbox, a small family of its own, and an honest submission."""

import json
import random

import pytest

from ai_trains_ai.interfaces import Sandbox, TaskFamily
from ai_trains_ai.records import (
    BaseModel,
    ConfigKey,
    ConfigRule,
    ConfigSurface,
    Item,
    Limits,
    Submission,
    Task,
    TaskLimits,
)
from ai_trains_ai.sandbox import BubblewrapSandbox
from ai_trains_ai.validation import CODES, Validator

SURFACE = ConfigSurface(
    keys=(
        ConfigKey("max_steps", "int", 8, "steps", 1, 64),
        ConfigKey("batch_size", "int", 64, "rollouts per step", 8, 512),
        ConfigKey("group_size", "int", 8, "rollouts per prompt", 4, 16, reason="Smaller groups have no variance."),
        ConfigKey("optim.lr", "float", 1e-3, "learning rate", 1e-5, 1e-1),
        ConfigKey("optim.type", "str", "adamw", "optimizer", choices=("adamw", "muon")),
        ConfigKey("sampling.temperature", "float", 1.0, "temperature", 0.0, 2.0),
        ConfigKey("advantage.normalize_std", "bool", False, "divide by the standard deviation"),
    ),
    rules=(
        ConfigRule(
            "batch-not-divisible",
            lambda config: config["batch_size"] % config["group_size"] == 0,
            "batch_size is no multiple of group_size.",
            "Use 64 and 8.",
        ),
    ),
)
MODELS = (BaseModel("pico-s", 32_736), BaseModel("pico-m", 118_656))
TASK = Task("sums-1", "sums", "Sums", "Add.", {}, limits=TaskLimits(rollouts=1280))
LIMITS = Limits(wall_seconds=2.0, cpu_seconds=3, memory_bytes=256 << 20, processes=16)

JOB = """
base_model = "pico-m"
[environment]
n = 24
[prime_rl]
max_steps = 16
optim.lr = 6e-4
"""
HEAD = """
import verifiers.v1 as vf
__all__ = ["Rows"]
class Row(vf.TaskData):
    answer: str
    steps: list[str]
"""
REWARD = """
class Worked(vf.Task[Row]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.split("so")[-1].strip() == self.data.answer)
"""
ROWS = """
class Config(vf.TasksetConfig):
    n: int = 32
class Rows(vf.Taskset[Worked, Config]):
    def load(self):
        for i in range(self.config.n):
            a, b = i % 9, (i * 5) % 7
            yield Worked(Row(prompt=f"{a} + {b} ->", answer=str(a + b), steps=[str(a + b)]), self.config.task)
"""
HONEST = HEAD + REWARD + ROWS


class Sums(TaskFamily):
    """Prompts like ``3 + 4 ->``, replies like ``7 so 7``."""

    name = "sums"
    summary = "one addition"

    def tasks(self):
        return (TASK,)

    def items(self, task: Task, rng: random.Random, n: int, *, hidden: bool):
        return []

    def item(self, prompt):
        words = prompt.split()
        if len(words) != 4 or words[1] != "+" or not (words[0] + words[2]).isdigit():
            return None
        total = str(int(words[0]) + int(words[2]))
        return Item(prompt, total, (total,), f"{words[0]}+{words[2]}")

    def gold(self, item):
        return f"{item.answer} so {item.answer}"

    def score(self, item, reply):
        return float(reply.split("so")[-1].strip() == item.answer)

    def partial(self, item, reply):
        return self.score(item, reply)


class Scripted(Sandbox):
    """A sandbox that gives prepared results: what the trusted side does with hostile frames."""

    def __init__(self, *results):
        self.results = list(results)

    def preload(self, *targets: str) -> None: ...

    def another(self, preload=()):
        raise NotImplementedError

    async def start(self):
        pass

    async def run(self, target, payload, **options):
        assert json.loads(payload)
        return self.results.pop(0)

    async def close(self):
        pass


@pytest.fixture(scope="session")
async def sandbox():
    pytest.importorskip("verifiers", reason="needs verifiers")
    async with BubblewrapSandbox(preload=("ai_trains_ai.environments.warm:warm_up",)) as box:
        yield box


@pytest.fixture
def validate(sandbox):
    """Validate an environment and a job given as text."""

    async def judge(source=HONEST, job=JOB, probes=None, files=None, reserved=None, family=None, box=sandbox):
        bundle = {"environment.py": source.encode(), "job.toml": job.encode()}
        if probes is not None:
            bundle["probes.jsonl"] = "\n".join(json.dumps(probe) for probe in probes).encode()
        validator = Validator(box, SURFACE, MODELS, reserved or (lambda key: False), LIMITS)
        report = await validator.validate(Submission.of("episode", 1, files or bundle), TASK, family or Sums())
        for finding in report.findings:
            assert finding.code in CODES or finding.code in {rule.code for rule in SURFACE.rules}
            assert len(finding.text()) < 240
        return report

    return judge
