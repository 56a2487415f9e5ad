"""Whose failure a prime-rl job's end is, and why."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
from attrs import evolve
from inner.prime_rl.failure_logs import CASES, Case, fatal, logged, raised, rank

from ai_trains_ai.inner.prime_rl.failures import MAX_BYTES, Evidence, Verdict, classify
from ai_trains_ai.inner.prime_rl.profiles import PROFILES
from ai_trains_ai.inner.prime_rl.rules import HEAD, RULES, V080, Process

FORGED = "".join(f"{case.text}\n" for case in CASES)
NEAR_MISSES = sorted((Path(__file__).parent / "near_misses").glob("*.txt"))

each_case = pytest.mark.parametrize(
    ("case", "version"),
    [(case, version) for case in CASES for version in case.versions],
    ids=[f"{i}-{case.code}-{version}" for i, case in enumerate(CASES) for version in case.versions],
)


def ended(process: Process, text: str, **changes: Any) -> Evidence:
    """A job that ended because this process ended by itself."""
    return evolve(Evidence({process: text.encode()}, {process: 1}), **changes)


def of(case: Case) -> Evidence:
    return ended(case.process, case.text, **case.ending)


def whose(verdict: Verdict) -> tuple[str, str]:
    return verdict.code, verdict.side


# ------------------------------------------------------------------------------------------------ the corpus


@each_case
def test_each_log_gives_its_rule(case: Case, version: str) -> None:
    assert classify(of(case), version).code == case.code


def test_each_rule_of_text_has_two_logs() -> None:
    shown = Counter(case.code for case in CASES)
    assert [rule.code for rule in RULES if rule.patterns and shown[rule.code] < 2] == []


def test_a_failure_that_a_version_does_not_have_is_unknown_in_it() -> None:
    elsewhere = [(case, version) for case in CASES for version in PROFILES if version not in case.versions]
    assert {classify(of(case), version).code for case, version in elsewhere} <= {"unknown", "environment-hang"}


@pytest.mark.parametrize("path", NEAR_MISSES, ids=lambda path: path.stem)
def test_near_misses_are_unknown(path: Path) -> None:
    head, _, text = path.read_text().partition("\n")
    process = cast(Process, head.removeprefix("# process: ").strip())
    verdicts = [classify(ended(process, text), version) for version in PROFILES]
    assert {verdict.code for verdict in verdicts} == {"unknown"}


# ------------------------------------------------------------------------------------------------ facts of the host


@pytest.mark.parametrize(
    ("evidence", "expected"),
    {
        "lost pod": (Evidence(heartbeat=False), ("pod-lost", "infrastructure")),
        "lost GPU": (Evidence(gpu="lost", exits={"trainer": 1}), ("pod-lost", "infrastructure")),
        "engine killed": (Evidence(exits={"trainer": -9}), ("host-memory", "infrastructure")),
        "engine killed in a shell": (Evidence(exits={"inference": 137}), ("host-memory", "infrastructure")),
        "environment killed": (Evidence(exits={"env": -9}), ("host-memory", "agent")),
        "no weights": (Evidence(exits={"trainer": 0}, phase="weights"), ("no-weights", "infrastructure")),
        "inference gone": (Evidence(exits={"inference": 0}), ("vllm-dead", "infrastructure")),
        "both ended": (Evidence(exits={"orchestrator": 1, "env": 1}), ("unknown", "agent")),
        "inference late": (Evidence(deadline="inference"), ("vllm-not-ready", "infrastructure")),
        "environment late": (Evidence(deadline="env_server"), ("environment-start", "agent")),
        "no step": (Evidence(deadline="step"), ("environment-hang", "agent")),
        "weights late": (Evidence(deadline="weights"), ("weights-wait", "infrastructure")),
        "broadcast late": (Evidence(deadline="broadcast"), ("broadcast", "infrastructure")),
        "evaluation late": (Evidence(deadline="evaluation"), ("evaluation-hang", "infrastructure")),
        "environment ended": (Evidence(exits={"env": 1}), ("unknown", "agent")),
        "engine ended": (Evidence(exits={"trainer": 1}), ("unknown", "infrastructure")),
    }.values(),
)
def test_facts_of_the_host_decide_without_a_log(evidence: Evidence, expected: tuple[str, str]) -> None:
    assert whose(classify(evidence)) == expected


def test_a_gpu_that_others_use_asks_for_another_pod() -> None:
    evidence = ended("inference", raised("ValueError: No available memory for the cache blocks."), gpu="occupied")
    assert classify(evidence).retry == "another pod"


def test_an_environment_that_ended_asks_for_no_retry() -> None:
    assert classify(ended("env", raised("ValueError: never seen"))).retry == "never"


def test_a_line_after_a_progress_bar_counts() -> None:
    text = "Loading: 10%\rLoading: 20%\rtorch.OutOfMemoryError: CUDA out of memory. Tried\n"
    assert classify(ended("trainer", text)).code == "trainer-memory"


def test_a_warning_that_the_engine_recovered_from_is_no_cause() -> None:
    text = logged("WARNING", "429 Client Error: Too Many Requests for url: x") + raised("ValueError: never seen")
    assert classify(ended("inference", text)).code == "unknown"


def test_a_verdict_becomes_the_failure_of_a_job() -> None:
    failure = classify(ended("trainer", rank("torch.OutOfMemoryError: CUDA out of memory."))).failure()
    assert (failure.side, failure.code) == ("agent", "trainer-memory")


def test_unknown_shows_the_last_lines() -> None:
    assert "ValueError: never seen" in classify(ended("trainer", raised("ValueError: never seen"))).evidence


# ------------------------------------------------------------------------------------------------ root causes


def test_a_full_disk_wins_over_the_broadcast_that_it_broke() -> None:
    text = logged("ERROR", "Error broadcasting weights for run 0: [Errno 28] No space left on device")
    assert classify(ended("trainer", text, exits={})).code == "disk-full"


def test_an_engine_without_memory_wins_over_its_death_and_the_waiting_orchestrator() -> None:
    inference = rank("ValueError: No available memory for the cache blocks.") + rank("vllm.EngineDeadError: x")
    orchestrator = fatal("TimeoutError: Inference server was not reached after 420 seconds")
    logs: dict[Process, bytes] = {"inference": inference.encode(), "orchestrator": orchestrator.encode()}
    assert classify(Evidence(logs, {"inference": 1, "orchestrator": 1})).code == "vllm-memory"


def test_truncation_does_not_explain_an_engine_that_broke() -> None:
    truncated = next(case.text for case in CASES if case.code == "truncation")
    logs: dict[Process, bytes] = {"orchestrator": truncated.encode(), "trainer": b"Segmentation fault\n"}
    assert whose(classify(Evidence(logs, {"trainer": -11}))) == ("unknown", "infrastructure")


def test_truncation_that_passed_is_none() -> None:
    early, late = (f"12:00:00 SUCCESS Step {i} | Error 0.0% | Truncation {share}%\n" for i, share in ((1, 90), (2, 5)))
    assert classify(ended("orchestrator", early + late, exits={}, deadline="step")).code == "environment-hang"


# ------------------------------------------------------------------------------------------------ text of the agent


@each_case
def test_forged_lines_of_the_environment_change_nothing(case: Case, version: str) -> None:
    honest = of(case)
    forged = evolve(honest, logs={**honest.logs, "env": FORGED.encode()})
    assert classify(forged, version).side == classify(honest, version).side


def test_the_environment_can_not_blame_the_infrastructure() -> None:
    assert {classify(ended("env", case.text), version).side for case in CASES for version in PROFILES} == {"agent"}


def test_what_the_environment_says_explains_rewards_without_signal() -> None:
    reward = b"12:00:00   ERROR Error calling reward function exact: KeyError('answer')\n"
    text = fatal("RuntimeError: 10 consecutive empty train batches").encode()
    evidence = Evidence({"orchestrator": text, "env": reward}, {"orchestrator": 1})
    assert [classify(evidence, version).code for version in (V080, HEAD)] == ["reward-raises", "zero-signal"]


@pytest.mark.parametrize("wrapped", ["{}", "12:00:00   ERROR {}", "12:00:00    INFO prompt\n{}\n12:00:00    INFO more"])
def test_a_prompt_in_the_orchestrators_log_does_not_blame_the_infrastructure(wrapped: str) -> None:
    texts = [fatal("OSError: [Errno 28] No space left on device"), "OSError: [Errno 28] No space left on device"]
    after = "\n12:00:09    INFO Going on\n"
    verdicts = [classify(ended("orchestrator", wrapped.format(text) + after, deadline="step")) for text in texts]
    assert [verdict.side for verdict in verdicts] == ["agent", "agent"]


def test_a_traceback_inside_of_a_message_is_not_the_cause() -> None:
    text = raised(
        "EnvServerError: the env server answered:\n" + raised("OSError: [Errno 28] No space left on device", "")
    )
    assert classify(ended("orchestrator", text)).code == "unknown"


def test_an_environment_that_kills_itself_does_not_hide_a_full_disk() -> None:
    evidence = ended("trainer", rank("OSError: [Errno 28] No space left on device"), exits={"env": -9, "trainer": 1})
    assert whose(classify(evidence)) == ("disk-full", "infrastructure")


def test_a_process_that_was_ended_has_no_last_words() -> None:
    text = fatal("OSError: [Errno 28] No space left on device")
    assert classify(ended("orchestrator", text, exits={}, deadline="step")).code == "environment-hang"


def test_a_message_inside_of_a_line_proves_nothing() -> None:
    text = "12:00:00   ERROR Reply: torch.OutOfMemoryError: CUDA out of memory. Tried\n"
    assert classify(ended("trainer", text)).code == "unknown"


# ------------------------------------------------------------------------------------------------ bounds


@pytest.mark.parametrize("unit", [b"a", b"\n", b"[", b"\x1b[", b"Step 1 | ", b"\xff", b"(a a a "], ids=repr)
def test_ten_megabytes_of_garbage_are_unknown(unit: bytes) -> None:
    garbage = unit * (10_000_000 // len(unit))
    assert classify(Evidence({"trainer": garbage, "orchestrator": garbage}, {"trainer": 1})).code == "unknown"


def test_a_line_that_the_cap_cuts_proves_nothing() -> None:
    cut = b"torch.OutOfMemoryError: CUDA out of memory.\n"
    text = b"said: " + cut + b"x" * (MAX_BYTES - len(cut))
    assert classify(Evidence({"trainer": text}, {"trainer": 1})).code == "unknown"


def test_what_is_before_the_cap_is_not_read() -> None:
    text = rank("torch.OutOfMemoryError: CUDA out of memory.") + "x" * MAX_BYTES
    assert classify(ended("trainer", text)).code == "unknown"
