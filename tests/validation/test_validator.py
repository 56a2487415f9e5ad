"""One case per kind of failure, each with its code; honest environments pass."""
# ruff: noqa: E501 - submissions as text

import json
import os

import pytest

from ai_trains_ai.errors import SandboxError
from ai_trains_ai.records import SandboxResult, content_hash

from .conftest import HEAD, HONEST, JOB, ROWS, Scripted


def worked(body, decorator="@vf.reward"):
    """A task whose reward has this body."""
    return f"{HEAD}\nclass Worked(vf.Task[Row]):\n    {decorator}\n    async def right(self, trace: vf.Trace) -> float:\n        {body}\n{ROWS}"


MULTI = (
    HEAD.replace('["Rows"]', '["Rows", "Ask"]')
    + """
class Worked(vf.Task[Row]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        said = [message.content for message in trace.assistant_messages]
        return float(said[0] == "HELP" and said[-1] == self.data.answer)
class Ask(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as chat:
            segment = await chat.turn()
            if segment.last_reply == "HELP":
                await chat.turn("just add them")
"""
    + ROWS
)
HONEST_ONES = {
    "single turn": HONEST,
    "several rewards": HEAD
    + """
class Worked(vf.Task[Row]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.split("so")[-1].strip() == self.data.answer)
    @vf.reward(weight=0.2)
    async def form(self, trace: vf.Trace) -> float:
        return float(" so " in trace.last_reply)
    @vf.reward(weight=0.3)
    async def steps(self, trace: vf.Trace) -> float:
        return sum(step in trace.last_reply.split() for step in self.data.steps) / len(self.data.steps)
    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)
"""
    + ROWS,
    "negative for wrong": worked(
        "return 1.0 if trace.last_reply.split('so')[-1].strip() == self.data.answer else -1.0"
    ),
    "prints and logs": HONEST.replace(
        "import verifiers", "print('hello')\nimport logging; logging.warning('x')\nimport verifiers"
    ),
    "a stop hook": HONEST.replace(
        ROWS,
        "    @vf.stop\n    async def enough(self, trace: vf.Trace) -> bool:\n        return trace.num_turns >= 1\n"
        + ROWS,
    ),
}


@pytest.mark.parametrize("name", HONEST_ONES)
async def test_an_honest_environment_is_valid(name, validate):
    report = await validate(HONEST_ONES[name])
    assert report.valid, report.text()
    assert report.text() == "valid"
    assert (report.stage, report.base_model, len(report.rows), report.dropped_rows) == ("freeze", "pico-m", 24, 0)
    assert report.environment == {"n": 24}
    assert report.config["max_steps"] == 16
    assert report.config["optim.type"] == "adamw"
    assert report.configured == ("max_steps", "optim.lr")
    assert report.content_hash == content_hash({"environment.py": HONEST_ONES[name].encode(), "job.toml": JOB.encode()})
    assert json.loads(report.rows[3]) == {"idx": 3, "prompt": "3 + 1 ->", "answer": "4", "steps": ["4"]}


async def test_a_multi_turn_environment_needs_probes_where_gold_does_not_fit(validate):
    assert [finding.code for finding in (await validate(MULTI)).errors] == ["reward-flat"]
    probes = [{"replies": ["HELP", "0"], "min": 1.0}, {"replies": ["HELP", "99"], "max": 0.0}]
    report = await validate(MULTI, probes=probes)
    assert report.valid, report.text()


PARSE = {
    "no-environment": {"files": {"job.toml": JOB.encode()}},
    "no-job": {"files": {"environment.py": HONEST.encode()}},
    "unknown-file": {"files": {"environment.py": HONEST.encode(), "job.toml": JOB.encode(), "x.py": b""}},
    "not-utf8": {"files": {"environment.py": b"\xff\xfe", "job.toml": JOB.encode()}},
    "file-too-big": {"source": HONEST + "#" * 70_000},
    "toml-syntax": {"job": 'base_model = "pico-m"\nmax_steps == 3\n'},
    "probes-syntax": {"probes": [{"replies": "x"}]},
}
SCHEMA = {
    "no-base-model": "[prime_rl]\nmax_steps = 3\n",
    "unknown-base-model": JOB.replace("pico-m", "pico-xl"),
    "unknown-table": JOB.replace("[prime_rl]", "[prime_lr]"),
    "unknown-key": JOB.replace("max_steps", "max_stps"),
    "wrong-type": JOB.replace("max_steps = 16", "max_steps = true"),
    "out-of-range": JOB.replace("6e-4", "nan"),
    "not-a-choice": JOB + 'optim.type = "sgd"\n',
    "batch-not-divisible": JOB + "batch_size = 60\n",
    "over-budget": JOB + "batch_size = 128\n",
}
STATIC = {
    "syntax-error": HONEST + "\ndef f(:\n",
    "no-all": HONEST.replace('__all__ = ["Rows"]', ""),
    "classic-api": "import verifiers as vf\n\ndef load_environment(**kwargs):\n    return vf.SingleTurnEnv(rubric=vf.Rubric())\n",
}
LOAD = {
    "import-error": HONEST + "\nx = 1 / 0\n",
    "missing-module": "import datasets\n" + HONEST,
    "no-taskset": HONEST.replace('["Rows"]', '["Row"]'),
    "no-rows": HONEST.replace("range(self.config.n)", "range(0)"),
    "rows-change": HONEST.replace("a, b = i % 9, (i * 5) % 7", "import random; a, b = random.randrange(99), 1"),
    "no-reward": HEAD + "\nclass Worked(vf.Task[Row]):\n    pass\n" + ROWS,
    "reserved-name": HONEST.replace("def right", "def score"),
    "reward-not-async": HONEST.replace("async def right", "def right"),
    "load-error": HONEST.replace("for i in", "raise KeyError('x')\n        for i in"),
    "crash": HONEST + "\nimport os; os._exit(0)\n",
    "timeout": HONEST + "\nwhile True: pass\n",
    "memory-limit": HONEST
    + "\nimport os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        x = bytearray(b'z') * (100 << 20); time.sleep(9)\ntime.sleep(9)\n",
    "output-limit": HONEST + "\nwhile True: print('x' * 1000)\n",
    "too-many-rows": HONEST.replace("range(self.config.n)", "range(5000)"),
}
SANITY = {
    "reward-flat": worked("return 1.0"),
    "reward-not-finite": worked("return float('nan') if 'know' in trace.last_reply else 1.0"),
    "reward-raises": worked("return float(trace.last_reply.split('so')[1])"),
    "reward-range": worked("return 1e9 * float(trace.last_reply.split('so')[-1].strip() == self.data.answer)"),
    "reward-changes": worked("import random; return random.random()"),
    "pays-wrong": worked("return float(' so ' in trace.last_reply and len(trace.last_reply) < 20)"),
    "pays-junk": worked("return float(trace.last_reply != '' and 'so' not in trace.last_reply)"),
    "crash": worked("import os; os._exit(0)"),
    "timeout": worked("\n        while True: pass"),
}


async def codes_of(awaitable, stage):
    report = await awaitable
    assert not report.valid
    assert report.stage == stage
    assert report.rows == ()
    assert {finding.stage for finding in report.errors} == {stage}
    return [finding.code for finding in report.errors], report


@pytest.mark.parametrize("code", PARSE)
async def test_parse(code, validate):
    codes, _ = await codes_of(validate(**PARSE[code]), "parse")
    assert codes == [code]


@pytest.mark.parametrize("code", SCHEMA)
async def test_schema(code, validate):
    codes, _ = await codes_of(validate(job=SCHEMA[code]), "schema")
    assert codes == [code]


@pytest.mark.parametrize("code", STATIC)
async def test_static(code, validate):
    codes, _ = await codes_of(validate(STATIC[code]), "static")
    assert codes == [code]


@pytest.mark.parametrize("code", LOAD)
async def test_load(code, validate):
    codes, _ = await codes_of(validate(LOAD[code]), "load")
    assert codes == [code]


@pytest.mark.parametrize("code", SANITY)
async def test_sanity(code, validate):
    codes, _ = await codes_of(validate(SANITY[code]), "sanity")
    assert code in codes


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("max_steps = 16.0", "wrong-type"),
        ('max_steps = "16"', "wrong-type"),
        ("max_steps = 0", "out-of-range"),
        ("max_steps = 1_000_000_000", "out-of-range"),
        ("optim.lr = true", "wrong-type"),
        ("optim.lr = inf", "out-of-range"),
        ("optim.lr = 1e400", "out-of-range"),
        ("advantage.normalize_std = 1", "wrong-type"),
        ("optim = 3", "unknown-key"),
        ("seed = 1", "unknown-key"),
        ("output_dir = '/'", "unknown-key"),
        ("model.trust_remote_code = true", "unknown-key"),
        ("env.HF_TOKEN = '${HF_TOKEN}'", "unknown-key"),
        ("optim.lr = 1979-05-27", "wrong-type"),
    ],
)
async def test_a_hyperparameter_is_checked_exactly(value, code, validate):
    codes, _ = await codes_of(validate(job=f'base_model = "pico-m"\n[prime_rl]\n{value}\n'), "schema")
    assert codes == [code]


async def test_nested_tables_and_dotted_keys_are_the_same_and_an_int_is_a_float(validate):
    job = 'base_model = "pico-m"\n[prime_rl]\nsampling = { temperature = 1 }\n[prime_rl.optim]\nlr = 0.01\n'
    report = await validate(job=job)
    assert report.valid
    assert (report.config["sampling.temperature"], report.config["optim.lr"]) == (1.0, 0.01)
    assert type(report.config["sampling.temperature"]) is float


async def test_findings_of_a_stage_come_together_with_places_and_hints(validate):
    job = 'base_model = "pico-x"\n[prime_rl]\nmax_stps = 3\ngroup_size = 2\n'
    _, report = await codes_of(validate(job=job), "schema")
    assert report.text().split("\n") == [
        "invalid",
        "[unknown-base-model] base_model: Unknown base model. Use pico-s or pico-m.",
        "[unknown-key] prime_rl.max_stps: Unknown key. Did you mean max_steps?",
        "[out-of-range] prime_rl.group_size: Out of range. Use 4 to 16. Smaller groups have no variance.",
    ]


@pytest.mark.parametrize(
    ("source", "place"),
    [
        (HONEST + "\nx = 1 / 0\n", f"environment.py:{HONEST.count(chr(10)) + 2}"),
        (worked("return 1 / 0"), "environment.py:11"),
        (HONEST + "\n)\n", f"environment.py:{HONEST.count(chr(10)) + 2}"),
    ],
    ids=["import", "reward", "syntax"],
)
async def test_an_error_names_its_line(source, place, validate):
    report = await validate(source)
    assert report.errors[0].place == place


async def test_the_environment_table_is_checked_in_the_child(validate):
    report = await validate(job=JOB.replace("n = 24", "m = 24"))
    assert report.errors[0].text() == "[environment-config] environment.m: Unknown field. Fields: n."


async def test_suspicious_code_only_warns(validate):
    report = await validate("import os\nimport socket\n" + HONEST)
    assert report.valid
    assert [finding.code for finding in report.findings] == ["suspicious-code", "suspicious-code"]


@pytest.mark.parametrize(
    ("probe", "code"),
    [
        ({"replies": ["0 so 0"], "min": 0.9}, None),
        ({"replies": ["junk"], "max": 0.1, "row": 5}, None),
        ({"replies": ["1 so 1"], "min": 0.9}, "probe-missed"),
        ({"replies": ["0 so 0"], "max": 0.5}, "probe-missed"),
    ],
)
async def test_the_agents_probes_are_honoured(probe, code, validate):
    report = await validate(probes=[probe])
    assert [finding.code for finding in report.errors] == ([code] if code else [])
    if code:
        assert report.errors[0].place == "probes.jsonl:1"


@pytest.mark.parametrize(
    "probe",
    [{}, {"replies": []}, {"replies": [1]}, {"replies": ["x"], "min": "1"}, {"replies": ["x"], "row": -1}, [1], 7],
)
async def test_a_broken_probe_is_refused(probe, validate):
    codes, _ = await codes_of(validate(probes=[probe]), "parse")
    assert codes == ["probes-syntax"]


async def test_a_probe_of_a_row_that_is_not_there_is_refused(validate):
    report = await validate(probes=[{"replies": ["x"], "row": 24, "max": 0.5}])
    assert report.errors[0].text() == "[probes-syntax] probes.jsonl:1: No such row. Rows are 0 to 23."


async def test_a_probe_of_a_hidden_row_is_left_out(validate):
    probes = [{"replies": ["wrong"], "row": 3, "min": 1.0}]
    assert not (await validate(probes=probes)).valid
    assert (await validate(probes=probes, reserved=lambda key: key == "3+1")).valid


async def test_rows_of_the_hidden_class_are_dropped_and_counted(validate):
    report = await validate(reserved=lambda key: key == "3+1")
    assert report.valid
    assert report.dropped_rows == 1
    assert len(report.rows) == 23
    assert all(json.loads(row)["prompt"] != "3 + 1 ->" for row in report.rows)


async def test_an_overlap_far_above_chance_is_told(validate):
    report = await validate(reserved=lambda key: int(key[0]) < 5)
    assert report.valid
    assert [finding.code for finding in report.findings] == ["hidden-overlap"]


async def test_nothing_left_is_an_error(validate):
    codes, _ = await codes_of(validate(reserved=lambda key: True), "load")
    assert codes == ["no-rows-left"]


async def test_prompts_that_the_family_can_not_read_only_warn(validate):
    source = HONEST.replace('f"{a} + {b} ->"', 'f"What is {a} and {b}?"')
    report = await validate(source)
    assert report.valid, report.text()
    assert [finding.code for finding in report.findings] == ["unread-prompts"]
    codes, _ = await codes_of(
        validate(source.replace("float(trace", "bool(trace.num_turns) + 0 * float(trace")), "sanity"
    )
    assert codes == ["reward-flat"]


async def test_a_family_that_fails_on_a_prompt_reads_it_as_foreign(validate):
    from .conftest import Sums

    class Fragile(Sums):
        def item(self, prompt):
            raise RuntimeError("boom")

    report = await validate(family=Fragile())
    assert [finding.code for finding in report.findings] == ["unread-prompts"]


async def test_repeated_rows_only_warn(validate):
    report = await validate(HONEST.replace("a, b = i % 9, (i * 5) % 7", "a, b = i % 3, 1"))
    assert report.valid
    assert [finding.code for finding in report.findings] == ["duplicate-rows"]


ROW = b'{"prompt": "1 + 2 ->", "answer": "3", "steps": []}'
ABOUT = ("about", b'{"weights": {}, "multi_turn": false, "fast": true}')
END = ("end", b"")


def exited(*frames, outcome="exited", code=0):
    return SandboxResult(outcome, code, frames)


@pytest.mark.parametrize(
    "result",
    [
        exited(),
        exited(("rows", ROW), ABOUT),
        exited(END, ("rows", ROW), ABOUT),
        exited(("rows", ROW), ("rows", ROW), ABOUT, END),
        exited(("rows", ROW), ABOUT, END, code=1),
        exited(("rows", ROW), ABOUT, END, outcome="signalled", code=-9),
        exited(("rows", b"\xff"), ABOUT, END),
        exited(("rows", b"[" * 100_000), ABOUT, END),
        exited(("rows", b'{"prompt": NaN}'), ABOUT, END),
        exited(("rows", b'{"prompt": "a", "prompt": "b"}'), ABOUT, END),
        exited(("rows", b'{"prompt": 3}'), ABOUT, END),
        exited(("rows", b'{"prompt": [{"role": "user"}]}'), ABOUT, END),
        exited(("rows", b"\n".join([ROW] * 5000)), ABOUT, END),
        exited(("rows", b'{"prompt": "%s"}' % (b"x" * 70_000)), ABOUT, END),
        exited(("rows", b'{"a": %s}' % (b"9" * 5000)), ABOUT, END),
        exited(("rows", ROW), ("about", b"[]"), END),
        exited(("rows", ROW), END),
        exited(("invalid", b'{"code": "made-up", "message": "x", "hint": "", "place": ""}'), END),
        exited(("invalid", b'{"code": 3}'), END),
    ],
)
async def test_hostile_frames_are_a_crash_of_the_child(result, validate):
    codes, _ = await codes_of(validate(box=Scripted(result)), "load")
    assert codes == ["crash"]


LOADED = exited(("rows", ROW), ABOUT, END)


@pytest.mark.parametrize(
    "scores",
    [b"", b"{}", b"[]", b"[[1, 1]]", b"[[NaN, 1]]", b'[["1", "1"]]', b"[[true, true]]", b"[[1e999, 1]]", b"[3]"],
)
async def test_hostile_scores_are_a_crash_of_the_child(scores, validate):
    codes, _ = await codes_of(validate(box=Scripted(LOADED, exited(("scores", scores), END))), "sanity")
    assert codes == ["crash"]


async def test_text_of_the_child_is_short_and_printable(validate):
    said = {"code": "load-error", "message": "\x1b[2J" + "x" * 999, "hint": "\x00", "place": "‮"}
    report = await validate(box=Scripted(exited(("invalid", json.dumps(said).encode()), END)))
    (finding,) = report.errors
    assert finding.message.isprintable()
    assert len(finding.message) <= 200
    assert finding.place == "?"


async def test_a_sandbox_that_fails_is_nobodys_verdict(validate):
    with pytest.raises(SandboxError, match="server died"):
        await validate(box=Scripted(SandboxResult("sandbox_error", detail="the server died")))


async def test_code_of_the_agent_never_runs_in_this_process(validate, tmp_path):
    source = HONEST + f"\nimport os\nopen({str(tmp_path / 'x')!r}, 'w')\nos.environ['LEFT'] = '1'\n"
    report = await validate(source)
    assert report.errors[0].code == "import-error"
    assert "LEFT" not in os.environ
    assert not list(tmp_path.iterdir())


async def test_one_submission_does_not_reach_another(validate):
    poison = (
        HONEST + "\nimport json, builtins\nvf.Task.hooks = lambda self, attr: []\njson.dumps = builtins.float = None\n"
    )
    assert not (await validate(poison)).valid
    assert (await validate()).valid


async def test_a_warm_validation_is_fast(validate):
    seconds = [(await validate()).seconds for _ in range(5)]
    assert min(seconds) < 0.5
