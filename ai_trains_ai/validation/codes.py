"""Every finding code, by stage, with its meaning. Codes are stable: agents learn them and reports count them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ai_trains_ai.errors import AiTrainsAiError
from ai_trains_ai.records import Finding, Severity

CODES: Mapping[str, str] = MappingProxyType(
    {
        # parse
        "no-environment": "environment.py is missing",
        "no-job": "job.toml is missing",
        "unknown-file": "a file that is no part of a submission",
        "file-too-big": "a file is too big",
        "not-utf8": "a file is no UTF-8 text",
        "toml-syntax": "job.toml is no TOML",
        "probes-syntax": "a line of probes.jsonl is no probe",
        # schema
        "unknown-table": "job.toml has a key at the top that nobody reads",
        "no-base-model": "job.toml names no base model",
        "unknown-base-model": "the base model does not exist",
        "unknown-key": "a hyperparameter that can't be set",
        "wrong-type": "a value of the wrong type",
        "out-of-range": "a value outside its bounds",
        "not-a-choice": "a value that is none of the choices",
        "over-budget": "the job would use more rollouts than the task allows",
        # static
        "syntax-error": "environment.py is no Python",
        "no-all": "environment.py has no __all__",
        "classic-api": "environment.py uses the API that verifiers has removed",
        "suspicious-code": "imports or calls that an environment hardly needs (warning)",
        # load and sanity: how the sandboxed process ended
        "timeout": "the code takes too long",
        "memory-limit": "the code takes too much memory",
        "output-limit": "the code prints too much",
        "result-limit": "the tasks are too big",
        "crash": "the code ended its process",
        # load
        "import-error": "environment.py raises at import",
        "missing-module": "environment.py imports a module that is not there",
        "environment-config": "a field of the [environment] table is wrong",
        "no-taskset": "__all__ names no taskset",
        "many-tasksets": "__all__ names several tasksets",
        "many-envs": "__all__ names several environments",
        "many-agents": "the environment has several agents",
        "load-error": "the taskset or its load() raises",
        "infinite": "the taskset never ends",
        "no-rows": "load() gives no task",
        "no-prompt": "a task has no prompt",
        "too-many-rows": "load() gives too many tasks",
        "rows-too-big": "the tasks are too big",
        "row-not-json": "task data does not survive JSON",
        "rows-change": "load() gives other tasks each time",
        "task-type": "load() gives tasks of another class than declared",
        "container": "the task needs a container",
        "toolset": "the task needs tools",
        "intercept": "the task intercepts requests",
        "judge": "the task needs a judge",
        "runtime-hook": "the task needs a runtime",
        "needs-runtime": "a reward needs a runtime",
        "no-reward": "the task has no reward",
        "reserved-name": "a reward has the name of a method of vf.Task",
        "reward-not-async": "a reward is not async",
        "reward-argument": "a reward takes an unknown argument",
        "duplicate-rows": "many tasks are the same (warning)",
        "unread-prompts": "prompts that are not of the task's family (warning)",
        "hidden-overlap": "far more tasks of the hidden class than by chance (warning)",
        "no-rows-left": "all tasks are of the hidden class",
        # sanity
        "agent-runs": "Env.run does not run its agent once",
        "reward-raises": "a reward raises",
        "reward-not-finite": "a reward is NaN or infinite",
        "reward-range": "a reward is outside -1000 to 1000",
        "reward-changes": "a reward differs for the same reply",
        "reward-flat": "all replies get the same reward",
        "pays-wrong": "wrong answers get what right ones get",
        "pays-junk": "empty or junk replies get what right ones get",
        "probe-missed": "a probe of probes.jsonl does not hold",
    }
)


class StageFailed(AiTrainsAiError):
    """A stage ends the validation. Carries its findings; never leaves this room."""

    def __init__(self, *findings: Finding) -> None:
        super().__init__(", ".join(finding.code for finding in findings))
        self.findings = findings


def finding(
    code: str, stage: str, message: str, hint: str = "", place: str = "", severity: Severity = "error"
) -> Finding:
    """A finding with a registered code."""
    assert code in CODES, code
    return Finding(code, stage, message, hint, place, severity)
