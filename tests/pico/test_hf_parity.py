"""transformers loads our folders and computes the same logits and gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ai_trains_ai.pico import model_folder
from ai_trains_ai.pico.checkpoint import tensors
from ai_trains_ai.pico.model import Qwen3
from ai_trains_ai.pico.tokenizer import Tokenizer

_REASON = "parity with transformers needs torch and transformers: pip install 'ai-trains-ai[local]'"
torch = pytest.importorskip("torch", reason=_REASON)
transformers = pytest.importorskip("transformers", reason=_REASON)


def reference(folder: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    return model.eval()


def test_logits_and_gradients(tiny: Qwen3, tmp_path: Path) -> None:
    tiny.save(tmp_path)
    theirs = reference(tmp_path)
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 40, (3, 12))
    hidden, tape = tiny.forward(ids[:, :4], np.zeros(3, np.int64), ids[:, None, 4:])
    logits, head_tape = tiny.head(hidden.reshape(-1, hidden.shape[-1]))
    expected = theirs(torch.tensor(ids)).logits[:, 3:-1]
    np.testing.assert_allclose(logits, expected.detach().numpy().reshape(logits.shape), atol=1e-4)

    weight = rng.standard_normal(logits.shape).astype(np.float32)
    (expected.reshape(logits.shape) * torch.tensor(weight)).sum().backward()
    tiny.backward(tiny.head_backward(weight, head_tape).reshape(hidden.shape), tape)
    ours = tensors(tiny, gradients=True)
    named = dict(theirs.named_parameters())
    assert named.keys() == ours.keys()
    for name, parameter in named.items():
        scale = np.abs(ours[name]).max()
        np.testing.assert_allclose(ours[name] / scale, parameter.grad.numpy() / scale, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("name", ["pico-s", "pico-m"])
def test_shipped_folder_with_padding_and_chat_template(name: str) -> None:
    folder = model_folder(name)
    theirs, ours = reference(folder), Qwen3.load(folder)
    fast = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["start 7 add 5 times 3 -> 2 6 so 6", "alert prod eu db disk 83 -> mid data so p2 data"]
    batch = fast(texts, return_tensors="pt", padding=True, padding_side="left")
    tokenizer = Tokenizer.load(folder)
    assert [tokenizer.encode(text) for text in texts] == [fast(text)["input_ids"] for text in texts]
    assert fast.apply_chat_template([{"role": "user", "content": texts[0]}], tokenize=False) == texts[0]

    ids, pad = batch["input_ids"].numpy(), (1 - batch["attention_mask"]).sum(1).numpy()
    positions = (torch.cumsum(batch["attention_mask"], 1) - 1).clamp(min=0)
    expected = theirs(**{k: batch[k] for k in ("input_ids", "attention_mask")}, position_ids=positions).logits
    hidden, _ = ours.forward(ids[:, :6], pad, ids[:, None, 6:])
    logits, _ = ours.head(hidden[:, 0])
    np.testing.assert_allclose(logits, expected[:, 5:-1].detach().numpy(), atol=1e-3)


def test_their_saved_folder_loads_here(tmp_path: Path) -> None:
    reference(model_folder("pico-s")).save_pretrained(tmp_path)
    np.testing.assert_array_equal(Qwen3.load(tmp_path).flat, Qwen3.load(model_folder("pico-s")).flat)
