"""Stages that need no sandbox: parsers under attack, and the judge of rewards."""

import inspect
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ai_trains_ai.errors import UntrustedDataError
from ai_trains_ai.records import TaskLimits
from ai_trains_ai.validation import CODES
from ai_trains_ai.validation import codes as codes_module
from ai_trains_ai.validation.codes import StageFailed
from ai_trains_ai.validation.parse import parse
from ai_trains_ai.validation.plain import finite, strict_json
from ai_trains_ai.validation.rows import chance_of
from ai_trains_ai.validation.sanity import Case, judge
from ai_trains_ai.validation.schema import check_schema
from ai_trains_ai.validation.static import scan

from .conftest import HONEST, MODELS, SURFACE

BOMBS = {
    "dotted key": "a" + ".a" * 4000 + " = 1",
    "dotted header": "[" + "a." * 4000 + "a]",
    "nested arrays": "a = " + "[" * 3000,
    "nested tables": "a = " + "{a=" * 500,
    "long number": "a = " + "9" * 1900,
    "many keys": "\n".join(f"k{n} = 1" for n in range(1200)),
    "duplicate": "a = 1\na = 2",
    "nul": "a = \x00",
    "inline dotted key": "prime_rl = {a" + ".a" * 900 + " = 1}",
    "inline dotted environment": "environment = {a" + ".a" * 900 + " = 1}",
    "lists over many lines": "environment = {a = " + "[\n" * 2000,
    "a list as deep as the parser goes": "[environment]\na = [\n" + "[\n" * 200 + "]\n" * 200 + "]",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_toml_bomb_is_refused_quickly(name):
    started = time.process_time()
    try:
        job = parse({"environment.py": b"", "job.toml": BOMBS[name].encode()}).job
        with pytest.raises(StageFailed):
            check_schema(job, SURFACE, MODELS, TaskLimits())
        codes = set()
    except StageFailed as failure:
        codes = {finding.code for finding in failure.findings}
    assert codes <= {"toml-syntax", "file-too-big"}, codes
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize(
    "source",
    [
        *(
            "(" * 60_000,
            "-" * 60_000 + "1",
            "x" + ".a" * 30_000,
            "1" + "+1" * 30_000,
            "\0",
            "f'" + "{" * 300,
            "9" * 60_000,
        ),
        "if x:\n pass\n" + "elif x:\n pass\n" * 4000,
    ],
    ids=["parentheses", "unary", "attributes", "sums", "nul", "f-string", "number", "elif"],
)
def test_a_source_bomb_is_refused_quickly(source):
    started = time.process_time()
    with pytest.raises(StageFailed) as caught:
        scan(source)
    assert caught.value.findings[0].code in ("syntax-error", "no-all")
    assert time.process_time() - started < 2


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60), st.text(max_size=60))
def test_no_text_makes_the_trusted_parsers_raise(toml, source):
    files = {"environment.py": source.encode(errors="replace"), "job.toml": toml.encode(errors="replace")}
    try:
        parsed = parse(files)
        scan(parsed.source)
        check_schema(parsed.job, SURFACE, MODELS, TaskLimits())
        findings = ()
    except StageFailed as failure:
        findings = failure.findings
    assert all(finding.code in CODES for finding in findings)


@pytest.mark.parametrize(
    "source",
    [
        "import verifiers as vf\n",
        "import verifiers\n",
        "from verifiers import SingleTurnEnv\n",
        "def load_environment():\n    pass\n",
    ],
)
def test_the_removed_api_is_explained(source):
    with pytest.raises(StageFailed) as caught:
        scan(source + '__all__ = ["Rows"]\n')
    (finding,) = caught.value.findings
    assert finding.code == "classic-api"
    assert "import verifiers.v1 as vf" in finding.hint


def test_the_present_api_is_not_taken_for_the_removed_one():
    assert scan(HONEST) == ()
    assert scan(HONEST.replace("import verifiers.v1 as vf", "from verifiers import v1 as vf")) == ()


def test_every_code_of_the_environments_room_is_registered():
    folder = Path(inspect.getfile(codes_module)).parents[1] / "environments"
    sources = "".join(path.read_text() for path in folder.glob("*.py"))
    used = set(re.findall(r"(?:InvalidEnvironment|_agent_code)\(\s*\"([a-z-]+)\"|code=\"([a-z-]+)\"", sources))
    codes = {code for pair in used for code in pair if code}
    assert len(codes) > 20
    assert codes <= set(CODES)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3.0),
        (0.5, 0.5),
        (10**400, None),
        (-(10**400), None),
        (float("nan"), None),
        (float("inf"), None),
        (True, None),
        ("1", None),
        (None, None),
        ([], None),
    ],
)
def test_only_a_finite_number_is_a_finite_number(value, number):
    assert finite(value) == number


@pytest.mark.parametrize("text", ['"\\ud800"', '{"\\uDFff": 1}', b'"\xed\xa0\x80"', "1".encode("utf-16"), b"\xff"])
def test_strict_json_refuses_half_characters_and_other_encodings(text):
    with pytest.raises(UntrustedDataError):
        strict_json(text)


def test_strict_json_takes_whole_characters():
    assert strict_json('"\\ud83d\\ude00"') == "\U0001f600"


@pytest.mark.parametrize("text", ["NaN", "[1e999]", '{"a": 1, "a": 2}', "-Infinity", "[" * 99_999, "1" * 5000, "", "{"])
def test_strict_json_refuses(text):
    with pytest.raises(UntrustedDataError):
        strict_json(text)


def cases(**rewards):
    """Two rows with these kinds of replies."""
    made, scores = [], []
    for row in (0, 1):
        for kind, values in rewards.items():
            for value in values:
                made.append(Case(row, ("x",), kind))
                scores.append((value, value))
    return [finding.code for finding in judge(made, scores)]


@pytest.mark.parametrize(
    ("rewards", "codes"),
    [
        ({"gold": [1.0], "junk": [0.0, 0.0, 0.0], "wrong": [0.0, 0.0]}, []),
        ({"gold": [1.0], "junk": [0.0, 0.1, 0.2], "wrong": [0.2, 0.3]}, []),
        ({"gold": [0.0], "junk": [-1.0], "wrong": [-0.5]}, []),
        ({"gold": [1.0], "junk": [0.0], "wrong": [1.0]}, ["pays-wrong"]),
        ({"gold": [1.0], "junk": [1.0], "wrong": [0.0]}, ["pays-junk"]),
        ({"gold": [0.0], "junk": [1.0], "wrong": [1.0]}, ["pays-junk", "pays-wrong"]),
        ({"gold": [1.0], "junk": [0.99], "wrong": [0.0]}, ["pays-junk"]),
        ({"gold": [0.5], "junk": [0.5], "wrong": [0.5]}, ["reward-flat"]),
        ({"candidate": [0.0, 1.0], "junk": [0.0]}, []),
        ({"gold": [2000.0], "junk": [0.0]}, ["reward-range"]),
    ],
)
def test_gold_must_clearly_beat_the_rest(rewards, codes):
    assert cases(**rewards) == codes


def test_rewards_that_differ_between_passes_are_refused():
    found = judge([Case(0, ("x",), "gold"), Case(0, ("y",), "junk")], [(1.0, 1.0), (0.0, 0.5)])
    assert [finding.code for finding in found] == ["reward-changes"]


@pytest.mark.parametrize(("hits", "n", "chance"), [(0, 10, 1.0), (1, 1, 0.125), (8, 8, 0.125**8), (32, 256, 0.53)])
def test_the_chance_of_an_overlap_is_binomial(hits, n, chance):
    assert chance_of(hits, n) == pytest.approx(chance, rel=0.03)
