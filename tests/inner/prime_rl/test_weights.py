"""Trained weights on a pod: which are taken, and which are refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from inner.prime_rl.safetensors import BF16_INF, BF16_NAN, BF16_ONE, write

from ai_trains_ai.inner.prime_rl.pod import weights

EMBED, HEAD, Q = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.weight"
OTHER = b"\x00\x40"  # 2 in bf16
BASE = {EMBED: ((3, 2), BF16_ONE * 6), Q: ((2, 2), BF16_ONE * 4)}
TRAINED = {**BASE, Q: ((2, 2), OTHER * 4)}
LAYOUT = {"weights": "weights/step_{step}", "broadcasts": "run_default/broadcasts/step_{step}"}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    write(folder / "model.safetensors", BASE)
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True, "from": "base"}))
    (folder / "tokenizer.json").write_text("base")
    return folder


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return tmp_path / "job"


def complete(run: Path, *folders: str) -> None:
    for folder in folders:
        (run / folder).mkdir(parents=True)
        (run / folder / "STABLE").touch()


class TestNewest:
    def test_it_is_the_highest_step_by_number(self, job: Path) -> None:
        complete(job, "weights/step_9", "weights/step_10", "run_default/broadcasts/step_8")
        assert weights.newest(job, LAYOUT, "STABLE", 10) == (10, job / "weights/step_10")

    def test_of_one_step_the_final_weights_are_preferred(self, job: Path) -> None:
        complete(job, "weights/step_4", "run_default/broadcasts/step_4")
        assert weights.newest(job, LAYOUT, "STABLE", 10) == (4, job / "weights/step_4")

    def test_a_newer_broadcast_saves_a_job_that_was_ended_early(self, job: Path) -> None:
        complete(job, "weights/step_4", "run_default/broadcasts/step_7")
        assert weights.newest(job, LAYOUT, "STABLE", 10) == (7, job / "run_default/broadcasts/step_7")

    def test_a_folder_without_its_marker_is_not_complete(self, job: Path) -> None:
        complete(job, "weights/step_4")
        (job / "weights/step_5").mkdir()
        assert weights.newest(job, LAYOUT, "STABLE", 10) == (4, job / "weights/step_4")

    def test_step_0_and_other_names_are_no_trained_weights(self, job: Path) -> None:
        complete(job, "run_default/broadcasts/step_0", "weights/step_", "weights/step_3x", "weights/latest")
        assert weights.newest(job, LAYOUT, "STABLE", 10) is None

    def test_a_step_that_the_job_does_not_have_is_none_of_it(self, job: Path) -> None:
        complete(job, "weights/step_9", "weights/step_999999999")
        assert weights.newest(job, LAYOUT, "STABLE", 10) == (9, job / "weights/step_9")

    def test_there_may_be_nothing(self, job: Path) -> None:
        assert weights.newest(job, LAYOUT, "STABLE", 10) is None


class TestCheck:
    def test_changed_weights_of_the_right_form_are_fine(self, base: Path, job: Path) -> None:
        write(job / "model.safetensors", TRAINED)
        assert weights.check(job, base) == ""

    def test_shards_count_together(self, base: Path, job: Path) -> None:
        write(job / "model-00001-of-00002.safetensors", {EMBED: TRAINED[EMBED]})
        write(job / "model-00002-of-00002.safetensors", {Q: TRAINED[Q]})
        assert weights.check(job, base) == ""

    def test_a_copy_of_tied_embeddings_may_be_there(self, base: Path, job: Path) -> None:
        write(job / "model.safetensors", {**TRAINED, HEAD: TRAINED[EMBED]})
        assert weights.check(job, base) == ""

    def test_a_copy_of_tied_embeddings_may_be_in_the_base_alone(self, base: Path, job: Path) -> None:
        write(base / "model.safetensors", {**BASE, HEAD: BASE[EMBED]})
        write(job / "model.safetensors", TRAINED)
        assert weights.check(job, base) == ""

    def test_an_output_head_of_its_own_may_not_be_missing(self, base: Path, job: Path) -> None:
        (base / "config.json").write_text("{}")
        write(base / "model.safetensors", {**BASE, HEAD: BASE[EMBED]})
        write(job / "model.safetensors", TRAINED)
        assert weights.check(job, base) == f"tensor {HEAD!r} is missing"

    def test_the_base_models_own_weights_are_untrained(self, base: Path, job: Path) -> None:
        write(job / "model.safetensors", BASE)
        assert weights.check(job, base).endswith(weights.UNTRAINED)

    @pytest.mark.parametrize("value", [BF16_NAN, BF16_INF], ids=["NaN", "infinity"])
    def test_values_must_be_finite(self, base: Path, job: Path, value: bytes) -> None:
        write(job / "model.safetensors", {**TRAINED, Q: ((2, 2), OTHER * 3 + value)})
        assert weights.check(job, base) == f"tensor {Q!r} has values that are {weights.NOT_FINITE}"

    @pytest.mark.parametrize(
        ("tensors", "odd"),
        [
            ({EMBED: BASE[EMBED]}, "is missing"),
            ({**TRAINED, "model.extra": ((1,), OTHER)}, "is not the base model's"),
            ({**TRAINED, Q: ((4, 1), OTHER * 4)}, "is BF16 (4, 1), not BF16 (2, 2)"),
            ({**TRAINED, Q: ((2, 2), OTHER * 3)}, "has 6 bytes, not 8"),
        ],
        ids=["missing", "extra", "shape", "size"],
    )
    def test_names_shapes_and_sizes_are_the_base_models(self, base: Path, job: Path, tensors: dict, odd: str) -> None:
        write(job / "model.safetensors", tensors)
        assert odd in weights.check(job, base)

    def test_the_type_is_the_base_models(self, base: Path, job: Path) -> None:
        write(job / "model.safetensors", TRAINED, dtype="F16")
        assert "is F16" in weights.check(job, base)

    def test_nothing_is_not_enough(self, base: Path, job: Path) -> None:
        job.mkdir()
        (job / "model.bin").write_bytes(b"pickle")
        assert weights.check(job, base) == "there is no safetensors file"

    @pytest.mark.parametrize(
        "ruin",
        [
            lambda data: data[:6],
            lambda data: struct.pack("<Q", 1 << 40) + data[8:],
            lambda data: struct.pack("<Q", 8) + b"not json" + data,
            lambda data: data[:-1],
            lambda data: struct.pack("<Q", 2) + b"[]",
            lambda data: struct.pack("<Q", 200_000) + b"[" * 200_000,
        ],
        ids=["short", "huge header", "no header", "cut", "no table", "deep"],
    )
    def test_a_ruined_file_is_refused(self, base: Path, job: Path, ruin: Callable[[bytes], bytes]) -> None:
        path = write(job / "model.safetensors", TRAINED)
        path.write_bytes(ruin(path.read_bytes()))
        assert "model.safetensors" in weights.check(job, base)

    def test_a_link_out_of_the_folder_is_refused(self, base: Path, job: Path) -> None:
        job.mkdir()
        (job / "model.safetensors").symlink_to(base / "model.safetensors")
        assert "leads out of the folder" in weights.check(job, base)

    def test_the_same_tensor_in_two_files_is_refused(self, base: Path, job: Path) -> None:
        write(job / "a.safetensors", TRAINED)
        write(job / "b.safetensors", {Q: TRAINED[Q]})
        assert "is there twice" in weights.check(job, base)


class TestAdapter:
    A, B = (f"base_model.model.{Q.removesuffix('.weight')}.lora_{side}.weight" for side in "AB")

    def test_a_pair_fits_its_weight(self, base: Path, job: Path) -> None:
        write(job / "adapter_model.safetensors", {self.A: ((1, 2), OTHER * 2), self.B: ((2, 1), OTHER * 2)})
        assert weights.check(job, base, adapter_rank=1) == ""

    def test_a_pair_of_another_rank_is_refused(self, base: Path, job: Path) -> None:
        write(job / "adapter_model.safetensors", {self.A: ((1, 2), OTHER * 2), self.B: ((2, 1), OTHER * 2)})
        assert "not (2, 2)" in weights.check(job, base, adapter_rank=2)

    def test_what_adapts_nothing_is_refused(self, base: Path, job: Path) -> None:
        write(job / "adapter_model.safetensors", {"model.norm.lora_A.weight": ((1, 2), OTHER * 2)})
        assert "adapts nothing" in weights.check(job, base, adapter_rank=1)

    def test_an_adapter_of_zeros_is_untrained(self, base: Path, job: Path) -> None:
        write(job / "adapter_model.safetensors", {self.A: ((1, 2), bytes(4)), self.B: ((2, 1), bytes(4))})
        assert weights.check(job, base, adapter_rank=1).endswith(weights.UNTRAINED)

    def test_an_adapter_whose_second_half_is_still_zero_changes_nothing(self, base: Path, job: Path) -> None:
        write(job / "adapter_model.safetensors", {self.A: ((1, 2), OTHER * 2), self.B: ((2, 1), bytes(4))})
        assert weights.check(job, base, adapter_rank=1).endswith(weights.UNTRAINED)


class TestLayOut:
    def test_weights_lie_beside_the_base_models_own_files(self, base: Path, job: Path, tmp_path: Path) -> None:
        write(job / "model.safetensors", TRAINED)
        (job / "config.json").write_text("of the job")
        (job / "chat_template.jinja").write_text("of the job")
        weights.lay_out(tmp_path / "served", job, base)
        served = {path.name: path.read_bytes() for path in (tmp_path / "served").iterdir()}
        assert sorted(served) == ["config.json", "model.safetensors", "tokenizer.json"]
        assert b'"base"' in served["config.json"]
        assert served["model.safetensors"] == (job / "model.safetensors").read_bytes()

    def test_the_index_of_shards_is_made_anew(self, base: Path, job: Path, tmp_path: Path) -> None:
        write(job / "model-1.safetensors", {EMBED: TRAINED[EMBED]})
        write(job / "model-2.safetensors", {Q: TRAINED[Q]})
        (job / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../../etc/passwd"}}')
        weights.lay_out(tmp_path / "served", job, base)
        index = json.loads((tmp_path / "served/model.safetensors.index.json").read_text())
        assert index["weight_map"] == {EMBED: "model-1.safetensors", Q: "model-2.safetensors"}

    def test_the_base_model_is_served_whole(self, base: Path, tmp_path: Path) -> None:
        weights.lay_out(tmp_path / "served", None, base)
        assert {path.name for path in (tmp_path / "served").iterdir()} == {path.name for path in base.iterdir()}

    def test_an_adapter_lies_apart_with_a_config_of_ours(self, base: Path, job: Path, tmp_path: Path) -> None:
        write(job / "adapter_model.safetensors", {TestAdapter.A: ((1, 2), OTHER * 2)})
        (job / "adapter_config.json").write_text("of the job")
        weights.lay_out(tmp_path / "served", job, base, {"r": 1})
        assert (tmp_path / "served/model.safetensors").is_file()
        assert json.loads((tmp_path / "served/adapter/adapter_config.json").read_text()) == {"r": 1}
        assert (tmp_path / "served/adapter/adapter_model.safetensors").is_file()
