"""Whatever bytes come from an agent or a child, the answer is a report with an error, never an exception."""

import json
import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ai_trains_ai.records import SandboxResult, Submission
from ai_trains_ai.validation import CODES, Validator
from ai_trains_ai.validation.codes import StageFailed
from ai_trains_ai.validation.rows import freeze

from .conftest import HONEST, JOB, LIMITS, MODELS, SURFACE, TASK, Scripted, Sums

HUGE = "9" * 400
NASTY = [
    *("", " ", "{", "null", "true", "3", "-1", '"hello"', "[]", "{}", "[[]]", "[[1]]", "[{}]", "[1, 2]", "NaN"),
    *("-Infinity", "1e999", HUGE, "-" + HUGE, f"[[{HUGE}, 1]]", f"[[1, -{HUGE}]]", f"[[{HUGE}.5, 1]]", "9" * 5000),
    *("[" * 100_000, '{"a":' * 50_000, "[" * 900 + "]" * 900, '"\\ud800"', '"\\udc00\\ud800"', '{"a": 1, "a": 2}'),
    *('{"prompt": null}', '{"prompt": {}}', '{"prompt": []}', '{"prompt": [1]}', '{"prompt": [[]]}'),
    *('{"prompt": "\\ud800 + 2 ->"}', '{"prompt": [{"role": "user"}]}', '{"prompt": [{"content": "x"}]}'),
    *('{"prompt": [{"role": [], "content": 3}]}', '{"prompt": [{"role": "user", "content": [{"text": 3}]}]}'),
    *('{"prompt": "x", "system_prompt": 3}', '{"prompt": "x", "system_prompt": {"a": 1}}', f'{{"prompt": {HUGE}}}'),
    *(f'{{"prompt": "x", "a": {HUGE}, "b": {"9" * 4300}}}', '{"multi_turn": []}', '{"code": [], "message": 1}'),
    *('{"code": "crash", "message": "m", "hint": "h", "place": null}', "\x00", "{}\n{}", "{}\n\n{}", "{}\r{}"),
]  # fmt: skip
BYTES = [*(text.encode() for text in NASTY), b"\xff", b"\xed\xa0\x80", "[]".encode("utf-16"), "[]".encode("utf-32")]
ROW = b'{"prompt": "1 + 2 ->", "answer": "3", "steps": []}'
ABOUT = b'{"weights": {}, "multi_turn": false, "fast": true}'


def ended(*frames):
    return SandboxResult("exited", 0, (*frames, ("end", b"")))


LOADED = ended(("rows", ROW), ("about", ABOUT))


async def judge(*results, job=JOB, probes=b""):
    files = {"environment.py": HONEST.encode(), "job.toml": job.encode(), "probes.jsonl": probes}
    validator = Validator(Scripted(*results), SURFACE, MODELS, lambda key: len(key.encode()) == 0, LIMITS)
    report = await validator.validate(Submission.of("e", 1, files), TASK, Sums())
    assert all(finding.text().encode() and finding.code in CODES for finding in report.findings)
    return report


def refused(report, stage):
    assert not report.valid
    assert report.stage == stage
    return {finding.code for finding in report.errors}


@pytest.mark.parametrize("data", BYTES, ids=range(len(BYTES)))
async def test_nasty_bytes_in_any_place_are_a_finding(data):
    rows = await judge(ended(("rows", data), ("about", ABOUT)), ended(("scores", data)))
    if rows.stage == "load":
        assert refused(rows, "load") == {"crash"}
    else:  # then the scores were read
        assert refused(rows, "sanity") == {"crash"}
    assert refused(await judge(LOADED, ended(("scores", data))), "sanity") == {"crash"}
    about = await judge(ended(("rows", ROW), ("about", data)), ended(("scores", data)))
    assert "crash" in refused(about, about.stage)
    assert refused(await judge(ended(("invalid", data))), "load") == {"crash"}
    assert refused(await judge(LOADED, ended(("invalid", data))), "sanity") == {"crash"}
    if data.strip():
        assert refused(await judge(LOADED, probes=b'{"replies": %s}' % data), "parse") <= {
            *("probes-syntax", "not-utf8", "file-too-big")
        }


@pytest.mark.parametrize("text", ['"hello"', "null", "3", "[]", "true"])
async def test_a_row_is_an_object(text):
    assert refused(await judge(ended(("rows", text.encode()), ("about", ABOUT))), "load") == {"crash"}


@pytest.mark.parametrize("bound", [HUGE, "-" + HUGE, "1e999", "NaN", "Infinity", "true", '"1"', "null", "[]"])
@pytest.mark.parametrize("name", ["min", "max"])
async def test_a_probes_bound_is_a_finite_number(bound, name):
    probe = f'{{"replies": ["x"], "{name}": {bound}}}'.encode()
    assert refused(await judge(probes=probe), "parse") == {"probes-syntax"}


async def test_a_probes_row_of_many_digits_is_no_row():
    probe = f'{{"replies": ["x"], "max": 1, "row": {HUGE}}}'.encode()
    assert refused(await judge(LOADED, probes=probe), "sanity") == {"probes-syntax"}


@pytest.mark.parametrize(
    ("line", "codes"),
    [
        (f"max_steps = {HUGE}", {"out-of-range"}),
        (f"optim.lr = {HUGE}", {"out-of-range"}),
        (f"optim.lr = -{HUGE}", {"out-of-range"}),
        (f"optim.lr = {HUGE}.0", {"out-of-range"}),
        (f"max_steps = 0x{'f' * 1900}", {"out-of-range"}),
        (f"seed = {HUGE}", {"unknown-key"}),
        (f"{'k' * 900} = 1", {"unknown-key"}),
        ("optim = [{lr = 1}]", {"unknown-key"}),
        ("optim.type = ['adamw']", {"wrong-type"}),
        ("optim.lr = 07:32:00", {"wrong-type"}),
        ("optim.lr = 1979-13-45", {"toml-syntax"}),
        ("optim.lr = 1979-05-27T00:00:00+99:99", {"toml-syntax"}),
    ],
)
async def test_a_nasty_hyperparameter_is_a_finding(line, codes):
    report = await judge(job=f'base_model = "pico-m"\n[prime_rl]\n{line}\n')
    assert refused(report, report.stage) == codes


@pytest.mark.parametrize("value", ["[]", "{}", "3", "true", "nan", "[['pico-m']]", "1979-05-27"])
async def test_a_nasty_base_model_or_table_is_a_finding(value):
    assert refused(await judge(job=f"base_model = {value}\n"), "schema") == {"unknown-base-model"}
    if value != "{}":
        job = f'base_model = "pico-m"\nenvironment = {value}\n'
        assert refused(await judge(job=job), "schema") == {"wrong-type"}


PLACES = ("rows", "about", "scores", "invalid", "end", "other")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=5)
    | st.sampled_from(["\ud800", "1 + 2 ->", "user"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["prompt", "role", "content", "system_prompt", "multi_turn", "code"]), inner),
    max_leaves=8,
).map(lambda value: json.dumps(value).encode())  # fmt: skip
FRAMES = st.lists(
    st.tuples(st.sampled_from(PLACES), JSON | st.binary(max_size=9) | st.sampled_from([b"", ROW, ABOUT])), max_size=4
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(FRAMES, FRAMES)
async def test_any_frames_give_a_report(first, second):
    report = await judge(ended(*first), ended(*second))
    assert not report.valid
    assert report.errors


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(JSON, min_size=1, max_size=3), st.text(max_size=80))
async def test_any_probes_and_jobs_give_a_report(probes, job):
    report = await judge(LOADED, ended(), probes=b"\n".join(probes))
    assert not report.valid
    assert not (await judge(job=job.encode("utf-8", "replace").decode())).valid


def frozen(*rows, about=ABOUT, reserved=lambda key: False, family=None):
    data = b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    return freeze({"rows": data, "about": about}, family or Sums(), reserved)


@pytest.mark.parametrize("row", [b"{}", b'{"prompt": "start ' + b"x " * 400 + b'"}'], ids=["empty", "unread"])
def test_too_many_rows_cost_nothing(row):
    started = time.process_time()
    with pytest.raises(StageFailed):
        freeze({"rows": (row + b"\n") * ((12 << 20) // (len(row) + 1)), "about": ABOUT}, Sums(), lambda key: False)
    assert time.process_time() - started < 0.1


def test_as_many_rows_as_are_allowed_take_no_second():
    text = "one two three 4 + " * 40
    rows = [{"prompt": text + str(n), "system_prompt": text} for n in range(4096)]
    started = time.process_time()
    assert frozen(*rows).total == 4096
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "3 + 1 ->"},
        {"prompt": "3  +\n1 ->"},
        {"system_prompt": "3 +", "prompt": " 1 ->"},
        {"system_prompt": "3 + 1 ->", "prompt": "5 + 5 ->"},
        {"system_prompt": "3 + 1 ->", "prompt": "go"},
        {"system_prompt": "3 + 1 ->"},
        {"system_prompt": "3 + 1 ->", "prompt": []},
        {"system_prompt": "Add well.", "prompt": "3 + 1 ->"},
        {"system_prompt": "Add well. ", "prompt": "3 + 1 ->"},
        {"prompt": "Add this.\n3 + 1 ->"},
        {"prompt": "3 + 1 ->\nThat was the question."},
        {"prompt": "Add this: 3 + 1 ->"},
        {"system_prompt": "Now add 3", "prompt": " + 1 ->"},
        {"prompt": [{"role": "user", "content": "3 + "}, {"role": "assistant", "content": "1 ->"}]},
        {"prompt": [{"role": "system", "content": "3 + 1"}, {"role": "user", "content": " ->"}]},
        {"system_prompt": "3", "prompt": [{"role": "user", "content": " +"}, {"role": "user", "content": " 1 ->"}]},
        {"prompt": [{"role": "assistant", "content": "3 + 1 ->"}, {"role": "user", "content": "5 + 5 ->"}]},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "3 + "}, {"type": "text", "text": "1 ->"}]}]},
        {"prompt": [{"role": "tool", "content": None}, {"role": "user", "content": "3 + 1 ->"}]},
        {"system_prompt": "5 + 5 -> 10\n", "prompt": "3 + 1 ->"},
    ],
)
def test_a_hidden_item_is_found_in_all_that_a_row_trains_on(row):
    others = [{"prompt": "2 + 2 ->"}, {"prompt": "What is this?"}]
    loaded = frozen(row, *others, reserved=lambda key: key == "3+1")
    assert loaded.indices == (1, 2)
    assert frozen(row, *others).indices == (0, 1, 2)  # and is the reason


def test_texts_of_a_row_that_only_look_alike_are_kept():
    rows = [
        {"system_prompt": "3 +", "prompt": "2 + 2 ->"},
        {"prompt": "13 + 1 ->"},
        {"prompt": "3 + 1 = 4"},
        {"prompt": "5 + 5 ->", "answer": "3 + 1 ->"},
    ]
    assert frozen(*rows, reserved=lambda key: key == "3+1").indices == (0, 1, 2, 3)


def test_a_prompt_that_was_cut_into_two_messages_is_read_by_a_real_family():
    from ai_trains_ai.families.chained_arithmetic import ChainedArithmetic
    from ai_trains_ai.families.hidden import reserved

    family = ChainedArithmetic()
    (item, *_) = family.items(family.tasks()[0], random.Random(0), 1, hidden=True)
    (public, *_) = family.items(family.tasks()[0], random.Random(0), 1, hidden=False)
    for cut in range(len(item.prompt) + 1):
        halves = {"system_prompt": item.prompt[:cut], "prompt": item.prompt[cut:]}
        loaded = frozen(halves, {"prompt": public.prompt}, reserved=reserved, family=family)
        assert loaded.indices == (1,), halves
    cut = {"system_prompt": public.prompt[:9], "prompt": public.prompt[9:]}
    assert frozen(cut, reserved=reserved, family=family).indices == (0,)
