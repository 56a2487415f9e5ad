"""Programs of the stand-in that really learns: ``learning.py NAME FOLDER ARGUMENT…``.

verifiers' own env server plays the agent's environment for real, the model is a tiny Qwen3 in NumPy, and the trainer
takes policy-gradient steps on all of it, in v0.8.0's layout. Orchestrator and env server see what a pod has on their
path; the others do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import programs
from programs import append, config, leave, log, on_gpu, run_folder

RATE = 400.0  # a tiny model wants so many times the learning rate of a real one
TOKENS = 4.0  # of a rollout that weighs as much as another


# ---------------------------------------------------------------------------------------------- models that answer


class Model(programs.Model):
    """Answers chats by sampling from its weights; an update of them is asked for by the path of a folder."""

    def __init__(self, port: int, weights: Path) -> None:
        from ai_trains_ai.pico.model import Qwen3
        from ai_trains_ai.pico.tokenizer import Tokenizer

        super().__init__(port)
        self.RequestHandlerClass = Handler
        self.model, self.tokenizer = Qwen3.load(weights), Tokenizer.load(weights)
        self.lock = threading.Lock()

    def update(self, folder: Path) -> None:
        from ai_trains_ai.pico.model import Qwen3

        with self.lock:
            self.model = Qwen3.from_bytes(self.model.config, (folder / "model.safetensors").read_bytes())

    def completion(self, asked: dict[str, Any]) -> dict[str, Any]:
        import numpy as np

        from ai_trains_ai.pico.decode import sample_groups

        ids = self.tokenizer.encode("".join(message["content"] for message in asked["messages"]))
        limit = asked.get("max_completion_tokens") or asked.get("max_tokens") or 16
        limit = min(limit, self.model.config.max_position_embeddings - len(ids))
        temperature = asked.get("temperature", 1.0)
        with self.lock:
            rng, end = np.random.default_rng(asked.get("seed")), self.tokenizer.eos_id
            drawn = sample_groups(self.model, [ids], 1, limit, temperature, rng, end)
        tokens = drawn.tokens[0, : drawn.lengths[0]].tolist()
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self.tokenizer.decode(tokens)},
            "finish_reason": "stop" if tokens[-1] == self.tokenizer.eos_id else "length",
            "logprobs": None,
        }
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(tokens), "total_tokens": len(ids) + len(tokens)}
        about = {"id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": asked.get("model", "")}
        return {**about, "choices": [choice], "usage": usage}


class Handler(programs.Handler):
    server: Model

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/update_weights":
            self.server.update(Path(asked["weight_dir"]))
            self._send(200, b"{}")
        elif self.path == "/v1/chat/completions":
            self._send(200, json.dumps(self.server.completion(asked)).encode())
        else:
            self._send(404, b"{}")


def inference() -> None:
    about = config()
    with on_gpu():
        Model(about["server"]["port"], Path(about["model"]["name"])).serve_forever()


def vllm() -> None:
    options = dict(argument[2:].split("=", 1) for argument in programs.ARGUMENTS[2:] if "=" in argument)
    Model(int(options["port"]), Path(programs.ARGUMENTS[1])).serve_forever()


# ---------------------------------------------------------------------------------------------- the environment


def env_server() -> None:
    import verifiers.v1 as vf
    from verifiers.v1.serve import env_config_data, serve_env

    about = config()
    data = env_config_data(vf.resolve_env_config(about["env"]))
    serve_env(max_workers=1, address=about["serve"]["address"], config_data=data)


# ---------------------------------------------------------------------------------------------- the training


def orchestrator() -> None:
    asyncio.run(orchestrate(config()))
    log("SUCCESS", "Orchestrator finished.")
    sys.stdout.flush()
    os._exit(0)


async def orchestrate(about: dict[str, Any]) -> None:
    import ata_job
    import verifiers.v1 as vf
    from verifiers.v1.serve import EnvClient

    server = EnvClient(f"tcp://127.0.0.1:{about['env_server_base_port']}")
    await server.wait_for_server_startup(timeout=60, interval=0.2)
    tasks = list(ata_job.FrozenRows(ata_job.AnyConfig(id="ata-job")).load())
    url = str(about["model"]["client"]["base_url"][0])
    client = vf.EvalClientConfig(base_url=url, api_key_var="ATA_NO_KEY")
    law = about["train"]["sampling"]
    sampling = vf.SamplingConfig(temperature=law["temperature"], max_tokens=law["max_completion_tokens"])
    group = about["group_size"]
    count = about["batch_size"] // group
    run = run_folder(about)

    async def rollout(task: Any) -> tuple[str, bool, float]:
        data = task.data.model_dump(mode="json")
        episode = await server.run(task_data=data, client=client, model="policy", sampling=sampling)
        (trace,) = episode.traces
        return str(trace.assistant_messages[-1].content), trace.is_truncated, float(trace.reward)

    for step in range(1, about["max_steps"] + 1):
        chosen = [tasks[(step * count + i) % len(tasks)] for i in range(count)]
        played = await asyncio.gather(*(rollout(task) for task in chosen for _ in range(group)))
        prompts = [task.data.prompt for task in chosen]
        (run / "rollouts").mkdir(parents=True, exist_ok=True)
        partial = run / "rollouts/partial"
        partial.write_text(json.dumps({"prompts": prompts, "group": group, "played": played}))
        partial.rename(run / f"rollouts/step_{step}.json")
        reward = sum(reward for _, _, reward in played) / len(played)
        truncated = sum(cut for _, cut, _ in played) / len(played)
        row = {
            "train/agg/all/agent/reward/mean": reward,
            "train/agg/all/agent/is_truncated/mean": truncated,
            "train/agg/all/agent/has_error/mean": 0.0,
        }
        append(run / "metrics.jsonl", {"step": step, "time": time.time(), **row})
        log("SUCCESS", f"Step {step} | 0.1s | Reward {reward:.4f} | Error 0.0% | Truncation {100 * truncated:.1f}%")
        new = run / f"broadcasts/step_{step}"
        while not (new / "STABLE").exists():  # noqa: ASYNC110 - a file of another process
            await asyncio.sleep(0.01)
        asked = urllib.request.Request(
            url.removesuffix("/v1") + "/update_weights", json.dumps({"weight_dir": str(new)}).encode(), method="POST"
        )
        with contextlib.closing(await asyncio.to_thread(urllib.request.urlopen, asked)):
            pass


def torchrun() -> None:
    from ai_trains_ai.pico.model import Qwen3
    from ai_trains_ai.pico.optim import optimizer
    from ai_trains_ai.pico.tokenizer import Tokenizer

    about = config()
    folder, run, base = Path(about["output_dir"]), run_folder(about), Path(about["model"]["name"])
    model, tokenizer = Qwen3.load(base), Tokenizer.load(base)
    rule = optimizer("adamw", model, max_norm=1.0)
    with on_gpu():
        for step in range(1, about["max_steps"] + 1):
            said = run / f"rollouts/step_{step}.json"
            while not said.exists():
                time.sleep(0.01)
            began = time.monotonic()
            stats = learn(model, tokenizer, json.loads(said.read_text()))
            if stats is not None:
                rule.step(about["trainer"]["optim"]["lr"] * RATE)
            leave(run / f"broadcasts/step_{step}", model.to_bytes())
            found = stats._asdict() if stats else {"loss": 0.0, "entropy": 0.0, "kl": 0.0}
            row = {
                "loss/mean": found["loss"],
                "entropy/all/mean": found["entropy"],
                "mismatch_kl/all/mean": found["kl"],
                "time/step": time.monotonic() - began,
            }
            append(folder / "metrics.jsonl", {"step": step, "time": time.time(), **row})
        leave(folder / f"weights/step_{about['max_steps']}", model.to_bytes())
    log("SUCCESS", "RL trainer finished!")


def learn(model: Any, tokenizer: Any, said: dict[str, Any]) -> Any:
    """The gradient of a step's rollouts, which the model of now sampled; ``None`` where no group varies."""
    import numpy as np

    from ai_trains_ai.pico.grpo import PolicyBatch, group_advantages, policy_gradient
    from ai_trains_ai.pico.model import left_pad

    shape = (len(said["prompts"]), said["group"])
    ids = [tokenizer.encode(text) + ([] if cut else [tokenizer.eos_id]) for text, cut, _ in said["played"]]
    longest = max(1, *map(len, ids))
    completions, mask = np.zeros((len(ids), longest), np.int64), np.zeros((len(ids), longest), bool)
    for row, tokens in enumerate(ids):
        completions[row, : len(tokens)], mask[row, : len(tokens)] = tokens, True
    advantages = group_advantages(np.array([reward for *_, reward in said["played"]]).reshape(shape))
    if not advantages.any():
        return None
    prompts, pad = left_pad([tokenizer.encode(prompt) for prompt in said["prompts"]])
    completions, mask = completions.reshape(*shape, longest), mask.reshape(*shape, longest)
    hidden, _ = model.forward(prompts, pad, completions)
    logits, _ = model.head(hidden[mask])
    logits -= logits.max(-1, keepdims=True)
    law = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    logprobs = np.zeros(mask.shape, np.float32)
    logprobs[mask] = law[np.arange(len(law)), completions[mask]]
    batch = PolicyBatch(prompts, pad, completions, mask, logprobs, advantages)
    return policy_gradient(model, batch, normaliser=TOKENS * len(ids))


{
    "inference": inference,
    "vllm": vllm,
    "env-server": env_server,
    "orchestrator": orchestrator,
    "torchrun": torchrun,
}[programs.NAME]()
