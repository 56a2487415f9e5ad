"""Stage 5: does the reward pay what it should? Trusted good and bad replies are scored in a sandboxed child.

Good replies come from the task's family, bad ones are empty, junk, or good replies to other tasks. The child sees
replies without their names, and its numbers are judged here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from attrs import frozen

from ai_trains_ai.errors import UntrustedDataError
from ai_trains_ai.interfaces import Sandbox, TaskFamily
from ai_trains_ai.records import Finding, Limits
from ai_trains_ai.validation.child import run_child
from ai_trains_ai.validation.codes import StageFailed, finding
from ai_trains_ai.validation.parse import Probe
from ai_trains_ai.validation.plain import finite, strict_json
from ai_trains_ai.validation.rows import Loaded

STAGE = "sanity"
TARGET = "ai_trains_ai.environments.probe:score"
MAX_PROBED_ROWS = 6
MAX_REWARD = 1e3
MIN_AUC = 0.9
MIN_MARGIN = 0.1
_JUNK = ("", "I don't know", "so " * 12 + "lorem ipsum 7 " * 120)
_TOLERANCE = 1e-9

Kind = Literal["gold", "junk", "wrong", "candidate", "probe"]


@frozen
class Case:
    """Replies (one per turn) to one row, and what they are."""

    row: int
    replies: tuple[str, ...]
    kind: Kind
    probe: Probe | None = None


async def check_rewards(
    sandbox: Sandbox,
    files: Mapping[str, bytes],
    environment: Mapping[str, Any],
    limits: Limits,
    family: TaskFamily,
    loaded: Loaded,
    probes: Sequence[Probe],
    rng: random.Random,
) -> None:
    """Run the battery. Raises `StageFailed` and `SandboxError`."""
    cases = list(make_cases(family, loaded, probes, rng))
    used = sorted({case.row for case in cases})
    request = {
        "environment": environment,
        "rows": [loaded.rows[row] for row in used],
        "cases": [[used.index(case.row), case.replies] for case in cases],
    }
    frames = await run_child(sandbox, TARGET, request, files, limits, STAGE)
    problems = list(judge(cases, _read_scores(frames, len(cases)), own_env=loaded.multi_turn))
    if problems:
        raise StageFailed(*problems)


def make_cases(family: TaskFamily, loaded: Loaded, probes: Sequence[Probe], rng: random.Random) -> Iterator[Case]:
    """Replies to try. Rows that the family can't read get no good reply, only the data of the row itself."""
    readable = [index for index, item in enumerate(loaded.items) if item is not None]
    known = readable or list(range(len(loaded.rows)))
    for row in sorted(rng.sample(known, min(MAX_PROBED_ROWS, len(known)))):
        item = loaded.items[row]
        for reply in _JUNK:
            yield Case(row, (reply,), "junk")
        if item is None:
            for reply in _candidates(loaded.rows[row]):
                yield Case(row, (reply,), "candidate")
            continue
        yield Case(row, (family.gold(item),), "gold")
        others = [other for other in loaded.items if other is not None and other.answer != item.answer]
        for other in rng.sample(others, min(2, len(others))):
            yield Case(row, (family.gold(other),), "wrong")
    for probe in probes:
        if probe.row >= loaded.total:
            hint = f"Rows are 0 to {loaded.total - 1}."
            raise StageFailed(finding("probes-syntax", STAGE, "No such row.", hint, probe.place))
        if probe.row in loaded.indices:  # else the row is of the hidden class and gone
            yield Case(loaded.indices.index(probe.row), probe.replies, "probe", probe)


def _candidates(row: str) -> Iterator[str]:
    """Replies that an honest reward may like, guessed from a row's own fields."""
    data = strict_json(row)
    values = [str(value) for name, value in data.items() if name not in ("idx", "prompt") and type(value) in (str, int)]
    for value in values[:4]:
        for form in ("{}", "so {}", "<answer>{}</answer>", "\\boxed{{{}}}"):
            yield form.replace("{{", "{").replace("}}", "}").replace("{}", value[:500])


def _read_scores(frames: Mapping[str, bytes], n: int) -> list[tuple[float, float]]:
    try:
        pairs = strict_json(frames["scores"])
        if len(pairs) != n or any(len(pair) != 2 for pair in pairs):
            raise UntrustedDataError("wrong number of scores")
        return [(_score(first), _score(second)) for first, second in pairs]
    except (UntrustedDataError, KeyError, TypeError):
        raise StageFailed(
            finding("crash", STAGE, "The rewards can't be read.", "Return a float.", "environment.py")
        ) from None


def _score(value: object) -> float:
    score = finite(value)
    if score is None:
        raise UntrustedDataError("a score is no finite number")
    return score


def judge(cases: Sequence[Case], scores: Sequence[tuple[float, float]], own_env: bool = False) -> Iterator[Finding]:
    """What is wrong with the rewards of ``cases``. ``scores`` has two passes for each."""
    place = "environment.py"
    hint = "Write probes.jsonl." if own_env else "Compare with the answer."
    if any(first != second for first, second in scores):
        yield finding("reward-changes", STAGE, "The same reply gets other rewards.", "Use no randomness.", place)
        return
    rewards = [first for first, _ in scores]
    if any(abs(reward) > MAX_REWARD for reward in rewards):
        yield finding("reward-range", STAGE, "A reward is outside -1000 to 1000.", "Use 0 to 1.", place)
        return
    if max(rewards) - min(rewards) <= _TOLERANCE:
        yield finding("reward-flat", STAGE, "All replies get the same reward.", hint, place)
        return
    for case, reward in zip(cases, rewards, strict=True):
        if case.probe and not case.probe.low - _TOLERANCE <= reward <= case.probe.high + _TOLERANCE:
            yield finding("probe-missed", STAGE, f"The reward is {reward:.3g}.", "Repair it.", case.probe.place)
    # A protocol over several turns may need more than the family's one reply: then the agent's own probes decide.
    if own_env and any(case.probe and case.probe.low > float("-inf") for case in cases):
        return
    for kind, code, message in (
        ("junk", "pays-junk", "Junk gets what right replies get."),
        ("wrong", "pays-wrong", "Wrong answers get what right ones get."),
    ):
        if not _beats(cases, rewards, kind):
            yield finding(code, STAGE, message, hint, place)


def _beats(cases: Sequence[Case], rewards: Sequence[float], bad: str) -> bool:
    """Whether gold clearly beats the bad replies of its own row; true when there is nothing to compare."""
    gold = {case.row: reward for case, reward in zip(cases, rewards, strict=True) if case.kind == "gold"}
    margins = [
        gold[case.row] - reward
        for case, reward in zip(cases, rewards, strict=True)
        if case.kind == bad and case.row in gold
    ]
    if not margins:
        return True
    wins = sum(1.0 if margin > _TOLERANCE else 0.5 if margin >= -_TOLERANCE else 0.0 for margin in margins)
    spread = max(rewards) - min(rewards)
    return wins / len(margins) >= MIN_AUC and sum(margins) / len(margins) >= MIN_MARGIN * spread
