"""Why did a prime-rl job fail, and whose failure was it?

Agent code runs in the env server alone. What that process printed explains a failure and never decides whose it is.
The orchestrator's log repeats texts of the environment (prompts, errors of rollouts), so something is proven to be the
infrastructure's there by its last words alone: the traceback that the log ends with, of a process that ended by itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal

from attrs import field, frozen

from ai_trains_ai.inner.prime_rl import rules
from ai_trains_ai.inner.prime_rl.profiles import DEFAULT
from ai_trains_ai.inner.prime_rl.rules import Deadline, Process, Retry, Rule
from ai_trains_ai.records import FailureSide, JobFailure

MAX_BYTES: Final = 256 << 10
MAX_LINES: Final = 4_000
MAX_LINE: Final = 1_000

KILLED: Final = (-9, 137)
LOUD: Final = ("", "ERROR", "CRITICAL", "FATAL")
"""Levels that prove something; empty is a line of no logger, as a traceback has. INFO has the Step lines alone."""

_BREAK: Final = re.compile(r"[\r\n]+")  # a progress bar ends its line with a carriage return
_ANSI: Final = re.compile(r"\x1b\[[0-9;]{0,16}m")
_PREFIX: Final = re.compile(
    r"(?:\[(?:rank|default)\d{1,4}\]: ?){0,2}"  # torchrun, which passes on what a rank prints
    r"(?:\([\w ]{1,40}pid=\d{1,9}\) )?"  # a process of vLLM
    r"(?:\d\d:\d\d:\d\d +(?P<engine>[A-Z]{4,8}) +(?:\[[^\]]{1,80}\] +)?"  # prime-rl
    r"|(?P<vllm>[A-Z]{4,8}) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]{1,80}\] "
    r"|(?P<server>[A-Z]{4,8}): +)?"  # uvicorn
)
_TRACEBACK: Final = "Traceback (most recent call last):"
_FRAME: Final = re.compile(r"  File \"|[> ] File \"")
_RAISED: Final = re.compile(r"[A-Za-z_][\w.]{0,120}(?:Error|Exception|Exit|Interrupt)\b")


@frozen
class Evidence:
    """What the supervisor on the pod and the controller know about a job that failed.

    Attributes:
        logs: The end of each process's log, from the beginning of a line.
        exits: Exit status of the processes that ended by themselves (a signal is negative); the ones that the
            supervisor ended are left out.
        phase: What the job was at when it ended; "weights" is after training.
        deadline: Which of the supervisor's deadlines passed.
        found: What the supervisor itself saw, one of ``rules.FOUND``; ``detail`` its words.
        heartbeat: The pod answered to the end.
        gpu: The state of the GPU, by the host.
        weights: Whether complete weights were there at the end.
    """

    logs: Mapping[Process, bytes] = field(factory=dict, repr=False)
    exits: Mapping[Process, int] = field(factory=dict)
    phase: Literal["launch", "inference", "environment", "training", "weights"] = "training"
    deadline: Deadline = ""
    found: str = ""
    detail: str = ""
    heartbeat: bool = True
    gpu: Literal["healthy", "occupied", "lost"] = "healthy"
    weights: bool = False


@frozen
class Line:
    """A line of a log: all of it, what it says without its prefix, and its level (empty: of no logger)."""

    raw: str
    text: str
    level: str

    @classmethod
    def of(cls, raw: str) -> Line:
        prefix = _PREFIX.match(raw)
        text = raw[prefix.end() :] if prefix else raw
        if text.startswith("  ") and not text.startswith("   "):
            text = text[2:]  # a detail of a message, as pydantic prints it
        return cls(raw, text, next(filter(None, prefix.group("engine", "vllm", "server")), "") if prefix else "")


@frozen
class Verdict:
    """Why a job failed. ``message`` is for the agent, ``evidence`` the line or fact that proves it."""

    code: str
    side: FailureSide
    retry: Retry
    message: str
    evidence: str

    def failure(self) -> JobFailure:
        return JobFailure(self.side, self.code, self.message, self.evidence)


def classify(evidence: Evidence, version: str = DEFAULT) -> Verdict:
    """The first rule of ``version`` that the evidence proves, or a verdict that says that none is."""
    logs = {process: _lines(log) for process, log in evidence.logs.items()}
    rule, proof = _proven(evidence, logs, version) or _unknown(evidence, logs)
    if rule.side == "agent" and rule.code in rules.EXPLAINED:
        told = _own_words(logs.get("env", []))
        for explanation in rules.EXPLANATIONS:
            if version in explanation.versions and (line := _match(explanation, told)):
                rule, proof = explanation, f"env: {line}"
                break
    return Verdict(rule.code, rule.side, rule.retry, rule.message, proof)


def _proven(evidence: Evidence, logs: Mapping[Process, list[Line]], version: str) -> tuple[Rule, str] | None:
    if not evidence.heartbeat or evidence.gpu == "lost":
        return rules.POD_LOST, "no heartbeat" if not evidence.heartbeat else "the host reports no GPU"
    for process, status in evidence.exits.items():
        if status in KILLED and process != "env":
            return rules.HOST_MEMORY, f"{process} ended with status {status}"
    broken = any(status for process, status in evidence.exits.items() if process != "env")
    for rule in rules.RULES:
        if version not in rule.versions or (rule.symptom and broken):
            continue
        for process in rule.logs:
            if process != "env" and (line := _match(rule, _admitted(rule, process, logs.get(process, []), evidence))):
                if rule.code == rules.GPU_OCCUPIED.code and evidence.gpu == "occupied":
                    rule = rules.GPU_OCCUPIED
                return rule, f"{process}: {line}"
    if evidence.exits.get("env") in KILLED:
        return rules.ENVIRONMENT_MEMORY, f"env ended with status {evidence.exits['env']}"
    if evidence.found:
        rule = rules.FOUND.get(evidence.found, rules.UNKNOWN)
        return rule, f"{evidence.found}: {evidence.detail}" if evidence.detail else evidence.found
    for rule in rules.RULES:
        if version in rule.versions and rule.deadline and rule.deadline == evidence.deadline:
            detail = f": {evidence.detail}" if evidence.detail else ""
            return rule, f"the deadline of {rule.deadline!r} passed{detail}"
    if evidence.exits.get("inference") == 0 and evidence.phase != "weights":  # a dead engine may end with status 0
        return rules.INFERENCE_ENDED, "inference ended with status 0 before the training did"
    if evidence.phase == "weights" and not evidence.weights and evidence.exits.get("trainer") == 0:
        return rules.NO_WEIGHTS, "the trainer ended with status 0; no complete weights"
    return None


def _admitted(rule: Rule, process: Process, lines: list[Line], evidence: Evidence) -> list[Line]:
    """The lines of a process's log that may prove the rule."""
    if process != "orchestrator":
        return lines
    last = _last_words(lines) if evidence.exits.get(process, 0) > 0 else []
    return last if rule.side == "infrastructure" else [*(line for line in lines if line.level), *last]


def _unknown(evidence: Evidence, logs: Mapping[Process, list[Line]]) -> tuple[Rule, str]:
    ended = [process for process, status in evidence.exits.items() if status] or list(evidence.exits)
    # nobody asked the env server to end, and whoever talks to it fails with it
    rule = rules.UNKNOWN_ENVIRONMENT if "env" in evidence.exits else rules.UNKNOWN
    shown = [f"{process}: {line.raw}" for process in ended or logs for line in logs.get(process, [])[-5:]]
    return rule, "\n".join([*(f"{p} ended with status {s}" for p, s in evidence.exits.items()), *shown])


def _lines(log: bytes) -> list[Line]:
    """The last lines that are not blank, without colours, each cut to a bounded length."""
    lines = _BREAK.split(log[-MAX_BYTES:].decode("utf-8", "replace"))
    lines = lines[1 if len(log) > MAX_BYTES else 0 :][-MAX_LINES:]  # the first of a cut log has lost its beginning
    cut = (_ANSI.sub("", line[: 2 * MAX_LINE])[:MAX_LINE].rstrip() for line in lines)
    return [Line.of(line) for line in cut if line]


def _match(rule: Rule, lines: list[Line]) -> str:
    """The line that proves the rule: the first one, or the last of as many as it takes."""
    found: list[str] = []
    shares: list[float] = []
    for line in lines:
        warns = rule.side == "agent" and line.level == "WARNING"
        if not (line.level in LOUD or warns or line.text.startswith("Step ")):
            continue
        if hit := next(filter(None, (pattern.match(line.text) for pattern in rule.patterns)), None):
            found.append(line.raw.strip())
            if rule.share:
                shares.append(float(hit.group(1)))
    if rule.share:
        return found[-1] if shares and shares[-1] >= rule.share else ""
    return found[rule.times - 1] if len(found) >= rule.times else ""


def _own_words(lines: list[Line]) -> list[Line]:
    """What loggers wrote, and what was raised: the rest was printed, and may quote anything."""
    first = next((i for i, line in enumerate(lines) if line.raw.endswith(_TRACEBACK)), len(lines))
    return [line for i, line in enumerate(lines) if line.level or (i > first and _RAISED.match(line.raw))]


def _last_words(lines: list[Line]) -> list[Line]:
    """The raise that a log ends with, after the last line of a logger.

    There must be one traceback alone: a second one may be part of a message, which agent code can write.
    """
    after = next((i + 1 for i in reversed(range(len(lines))) if lines[i].level), 0)
    starts = [i for i in range(after, len(lines)) if lines[i].raw.endswith(_TRACEBACK)]
    if len(starts) != 1 or not any(_FRAME.match(line.raw) for line in lines[starts[0] :]):
        return []
    return [line for line in lines[starts[0] + 1 :] if _RAISED.match(line.raw)][:1]
