"""What travels to a pod with a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve
from inner.prime_rl.jobs import A40, SMALL, TWO_A5000, config, job, read

from ai_trains_ai.errors import ConfigurationError, WorkspaceError
from ai_trains_ai.inner.prime_rl.memory import SHAPES, Machine
from ai_trains_ai.inner.prime_rl.profiles import PROFILES, profile
from ai_trains_ai.inner.prime_rl.shipment import Deadlines, Engine, library, modules, serve_order, shipment

FOLDER = "/pod/jobs/j.1/files"
ENGINE = Engine(profile())
JOB = evolve(
    job(config()),
    files={"environment.py": b"agent's", "helpers/x.py": b"more"},
    rows=('{"prompt": "a"}', '{"prompt": "b"}'),
)


def order(files: dict[str, bytes]) -> dict:
    return json.loads(files["order.json"])


def test_rows_and_submission_go_as_they_were_validated() -> None:
    files = shipment(JOB, ENGINE, A40, SMALL, FOLDER)
    assert files["rows.jsonl"] == b'{"prompt": "a"}\n{"prompt": "b"}\n'
    assert (files["submission/environment.py"], files["submission/helpers/x.py"]) == (b"agent's", b"more")


def test_no_agent_code_is_where_the_trusted_processes_import_from() -> None:
    files = shipment(JOB, ENGINE, A40, SMALL, FOLDER)
    trusted = [path for path in files if path.startswith(("modules/trusted/", "lib/"))]
    assert trusted
    assert not [path for path in trusted if files[path] in JOB.files.values()]


@pytest.mark.parametrize("version", PROFILES)
def test_the_config_is_the_versions_own_and_names_the_jobs_folder(version: str) -> None:
    files = shipment(JOB, evolve(ENGINE, profile=profile(version)), A40, SMALL, FOLDER)
    compiled = read(files["rl.toml"].decode())
    assert compiled["output_dir"] == f"{FOLDER}/run" == order(files)["site"]["folder"]
    assert compiled["model"]["name"] == f"/models/{SMALL.name}" == order(files)["site"]["model"]


def test_jobs_beside_each_other_have_ports_of_their_own() -> None:
    sites = [order(shipment(JOB, ENGINE, A40, SMALL, FOLDER, slot))["site"] for slot in range(3)]
    ports = [site[name] for site in sites for name in ("inference_port", "env_port", "rollout_port")]
    assert len(set(ports)) == 9


def test_the_time_to_train_is_the_tasks() -> None:
    limited = evolve(JOB, limits=evolve(JOB.limits, seconds=77.0))
    assert order(shipment(limited, ENGINE, A40, SMALL, FOLDER))["deadlines"]["train"] == 77.0


def test_all_deadlines_together_bound_the_job() -> None:
    deadlines = Deadlines()
    assert deadlines.total(100.0) > 100.0 + deadlines.launch + deadlines.inference + 2 * deadlines.environment


def test_a_job_that_does_not_fit_is_refused_with_the_sum() -> None:
    with pytest.raises(ConfigurationError, match="GiB"):
        shipment(JOB, ENGINE, Machine("NVIDIA GeForce RTX 4090", 1), SHAPES["Qwen/Qwen3-4B"], FOLDER)


def test_a_file_that_leads_out_of_the_submission_is_refused() -> None:
    with pytest.raises(WorkspaceError):
        shipment(evolve(JOB, files={"../order.json": b"mine"}), ENGINE, A40, SMALL, FOLDER)


def test_a_config_that_is_not_resolved_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_steps"):
        shipment(evolve(JOB, config={}), ENGINE, A40, SMALL, FOLDER)


def test_two_gpus_are_told_to_the_supervisor() -> None:
    assert order(shipment(JOB, ENGINE, TWO_A5000, SMALL, FOLDER))["gpus"] == 2


def test_the_pre_flight_can_be_left_out() -> None:
    files = shipment(JOB, evolve(ENGINE, preflight=False), A40, SMALL, FOLDER)
    assert order(files)["preflight"] == {"rollouts": 0, "tasks": 0}


@pytest.mark.parametrize("module", ["supervisor", "server", "weights"])
def test_our_code_runs_on_the_pod_with_nothing_but_the_standard_library(module: str, tmp_path: Path) -> None:
    for path, data in library().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'lib')!r}); "
         f"import ai_trains_ai.inner.prime_rl.pod.{module} as m; print(m.__file__)"],
        capture_output=True, text=True, env={"PATH": os.environ["PATH"]}, timeout=60,
    )  # fmt: skip
    assert done.stdout.startswith(str(tmp_path)), done.stderr


def test_an_agents_module_finds_the_practice_rows_on_the_pod(tmp_path: Path) -> None:
    for path, data in modules().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'modules/agent')!r})\n"
        "from ai_trains_ai.families import BUILT_IN\nfrom ai_trains_ai.families.practice import practice\n"
        "import ai_trains_ai.families as f\n"
        "print(f.__file__, [len(practice(name, 2, 2, 8)) for name in BUILT_IN])"
    )
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(str(tmp_path)), done.stderr
    assert "[8, 8, 8]" in done.stdout


def test_a_base_model_is_served_as_it_is() -> None:
    found = json.loads(serve_order(ENGINE, SMALL.name, "", {}, port=1, max_model_len=2))
    assert (found["weights"], found["adapter"], found["base"]) == ("", None, f"/models/{SMALL.name}")


def test_an_adapter_is_described_by_the_jobs_own_config() -> None:
    trained = config(lora__rank=4, lora__alpha=16.0)
    found = json.loads(serve_order(ENGINE, SMALL.name, "/w", trained, port=1, max_model_len=2))
    assert (found["adapter"]["r"], found["adapter"]["lora_alpha"]) == (4, 16.0)
