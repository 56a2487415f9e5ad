"""The endpoints of a local Tinker. A run's requests are done in the order of their numbers, as the service does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from aiohttp import web
from attrs import define, field
from tinker.proto import tinker_public_pb2 as pb

from ai_trains_ai.outer.embedded import EmbeddedPolicy, OuterTokenizer
from ai_trains_ai.pico import model_folder
from ai_trains_ai.pico.model import Qwen3
from ai_trains_ai.records import SamplingParams
from fakes.tinker.faults import FAULT, Fault, answer
from fakes.tinker.model import Adapter, Refused, common, loss_and_logprobs

MODEL = "tiny/outer"
PROTO = "application/x-protobuf"
REMEMBERED = 512
_SAVED = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}
_DENSE = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}

Work = Callable[[], Any]


@define(eq=False)
class _Run:
    """A training run: its adapter, and where it stands in its sequence of requests."""

    adapter: Adapter
    session: str
    rank: int
    next: int = 1
    moved: asyncio.Condition = field(factory=asyncio.Condition)


@define(eq=False)
class _Sampler:
    """A frozen version, and what it has read and said, for an honest count of cached tokens."""

    policy: EmbeddedPolicy
    path: str | None
    session: str
    known: list[tuple[int, ...]] = field(factory=list)


class TinkerServer:
    """See `tinker_server`. ``calls`` are the paths asked for, in order; ``faults`` happen to the next requests."""

    def __init__(self, folder: Path, *, context: int | None = None, clock: Callable[[], float] = time.time) -> None:
        self.faults: list[Fault] = []
        self.calls: list[str] = []
        self.keys: set[str] = set()
        self.losses: list[str] = []
        self.live: set[str] = set()
        self.cached: list[int] = []
        self.latency = 0.0
        self.url = ""
        self._folder, self._clock = folder, clock
        model = model_folder("outer")
        self._base, self._tokenizer = Qwen3.load(model), OuterTokenizer(model)
        self.context = context or self._base.config.max_position_embeddings
        self._runs: dict[str, _Run] = {}
        self._samplers: dict[str, _Sampler] = {}
        self._futures: dict[str, asyncio.Future[Any]] = {}
        self._asked: dict[tuple[str, int], dict[str, Any]] = {}
        self._compute = threading.Lock()

    # ------------------------------------------------------------------------------------------ life

    def start(self) -> None:
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(30)

    def stop(self) -> None:
        """End it; a second call does nothing."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(30)

    def _serve(self, ready: threading.Event) -> None:
        async def main() -> None:
            self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
            runner = web.AppRunner(self._app(), shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
            ready.set()
            await self._over.wait()
            for future in self._futures.values():
                future.cancel()
            await runner.cleanup()

        asyncio.run(main())

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._middleware], client_max_size=1 << 28)
        post: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {
            "client/config": self._config,
            "client/dynamic_config": self._config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session}/finish": self._finish,
            "create_model": self._create_model,
            "load_weights": self._load_weights,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save("weights"),
            "save_weights_for_sampler": self._save("sampler_weights"),
            "save_weights_external": self._save("external_weights"),
            "create_sampling_session": self._create_sampling_session,
            "asample": self._asample,
            "retrieve_future": self._retrieve,
            "cancel_future": self._accept,
            "telemetry": self._accept,
            "weights_info": self._weights_info,
        }
        for path, handler in post.items():
            app.router.add_post(f"/api/v1/{path}", handler)
        runs = "/api/v1/training_runs/{run}/checkpoints"
        app.router.add_get("/api/v1/get_server_capabilities", self._capabilities)
        app.router.add_get("/api/v1/samplers/{sampler}", self._get_sampler)
        app.router.add_get(runs, self._list)
        app.router.add_delete(runs + "/{checkpoint:.+}", self._delete)
        app.router.add_put(runs + "/{checkpoint:.+}/ttl", self._set_ttl)
        app.router.add_get(runs + "/{checkpoint:.+}/external_weights_urls", self._external_urls)
        app.router.add_get("/files/{name:.+}", self._file)
        return app

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls.append(f"{request.method} {request.path.removeprefix('/api/v1/')}")
        self.keys.add(request.headers.get("X-API-Key", ""))
        return await answer(self.faults, request, handler)

    # ------------------------------------------------------------------------------------------ sessions

    async def _config(self, request: web.Request) -> web.Response:
        return web.json_response({"pjwt_auth_enabled": False})

    async def _accept(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "accepted"})

    async def _create_session(self, request: web.Request) -> web.Response:
        session = uuid.uuid4().hex
        self.live.add(session)
        return web.json_response({"type": "create_session", "session_id": session})

    async def _heartbeat(self, request: web.Request) -> web.Response:
        session = (await request.json())["session_id"]
        if session not in self.live:
            return _no(410, f"session {session} has ended")
        return web.json_response({"type": "session_heartbeat"})

    async def _finish(self, request: web.Request) -> web.Response:
        self.lose(request.match_info["session"])
        return web.json_response({})

    def lose(self, *sessions: str) -> None:
        """End sessions, with what was made in them; all without a name."""
        for session in sessions or tuple(self.live):
            self.live.discard(session)
            self._runs = {name: run for name, run in self._runs.items() if run.session != session}
            self._samplers = {name: sampler for name, sampler in self._samplers.items() if sampler.session != session}

    async def _capabilities(self, request: web.Request) -> web.Response:
        model = {"model_name": MODEL, "max_context_length": self.context, "trainable": True, "sampleable": True}
        return web.json_response({"supported_models": [model]})

    # ------------------------------------------------------------------------------------------ training

    async def _create_model(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["base_model"] != MODEL:
            return _no(404, f"model {body['base_model']} not found")
        name = f"{body['session_id']}:train:{body['model_seq_id']}"
        lora = body.get("lora_config") or {}
        adapter = Adapter(self._base, lora.get("rank", 32), lora.get("seed") or 0)
        self._runs[name] = _Run(adapter, body["session_id"], adapter.rank)
        return self._later(request, self._ready({"type": "create_model", "model_id": name}))

    async def _load_weights(self, request: web.Request) -> web.Response:
        body = await request.json()
        path = self._checkpoint(body["path"], "weights")
        if path is None:
            return _no(404, f"checkpoint {body['path']} not found")
        name = f"{body['session_id']}:train:{body['model_seq_id']}"
        adapter = Adapter.load(self._base, path, optimizer=bool(body.get("optimizer")))
        self._runs[name] = _Run(adapter, body["session_id"], adapter.rank)
        return self._later(request, self._ready({"type": "load_weights", "path": body["path"], "model_id": name}))

    async def _get_info(self, request: web.Request) -> web.Response:
        name = (await request.json())["model_id"]
        if name not in self._runs:
            return _no(404, f"model {name} not found")
        data = {"arch": "qwen3", "model_name": MODEL, "tokenizer_id": None}
        return web.json_response(
            {"type": "get_info", "model_id": name, "model_data": data, "model_name": MODEL, "is_lora": True,
             "lora_rank": self._runs[name].rank}
        )  # fmt: skip

    async def _forward_backward(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.headers.get("Content-Encoding") == "zstd":
            body = zstandard.ZstdDecompressor().decompress(body)
        asked = pb.ForwardBackwardRequest.FromString(body)
        nan = self._fault(request).nan
        return self._in_order(request, asked.model_id, asked.seq_id, lambda run: self._gradient(run, asked, nan))

    def _gradient(self, run: _Run, asked: Any, nan: bool) -> bytes:
        self.losses.append(asked.loss_fn)
        model, total, logprobs = run.adapter.model(), 0.0, []
        for datum in asked.data:
            inputs = np.concatenate([np.frombuffer(c.encoded_text.tokens, np.int32) for c in datum.model_input])
            arrays = {name: np.frombuffer(t.dense, _DENSE[t.dtype]) for name, t in datum.loss_fn_inputs.items()}
            for name, array in arrays.items():
                if not np.isfinite(array).all():
                    raise Refused(f"NonFiniteInTensor: {name}")
            config, backward = dict(asked.loss_fn_config), not asked.forward_only
            value, found = loss_and_logprobs(model, inputs.astype(np.int64), arrays, asked.loss_fn, config, backward)
            total += value
            logprobs.append(np.full_like(found, np.nan) if nan else found)
        if not asked.forward_only:
            run.adapter.accumulate(model)
        out = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
        tensor = out.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(asked.data)).fields["logprobs"]
        tensor.data = b"".join(found.tobytes() for found in logprobs)
        tensor.offsets = np.cumsum([0, *(4 * len(found) for found in logprobs)]).astype(np.int64).tobytes()
        tensor.dtype = pb.DTYPE_FLOAT32
        out.metrics["loss:sum"] = total
        return bytes(out.SerializeToString())

    async def _optim_step(self, request: web.Request) -> web.Response:
        body = await request.json()
        adam = body.get("adam_params") or body["optimizer_params"]

        def step(run: _Run) -> dict[str, Any]:
            return {"type": "optim_step", "metrics": {"grad_norm:mean": run.adapter.step(adam)}}

        return self._in_order(request, body["model_id"], body["seq_id"], step)

    def _save(self, kind: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def save(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            name = body.get("path") or f"ephemeral-{body['seq_id']}"

            def write(run: _Run) -> dict[str, Any]:
                path = f"tinker://{body['model_id']}/{kind}/{name}"
                target = self._place(path)
                if target.exists() and not body.get("overwrite"):
                    raise Refused(f"checkpoint {path} exists")
                target.parent.mkdir(parents=True, exist_ok=True)
                if kind == "external_weights":
                    run.adapter.export(target, MODEL)
                else:
                    run.adapter.save(target, optimizer=kind == "weights")
                self._live_for(target, body.get("ttl_seconds"))
                return {"type": _SAVED[kind], "path": path}

            return self._in_order(request, body["model_id"], body["seq_id"], write)

        return save

    # ------------------------------------------------------------------------------------------ sampling

    async def _create_sampling_session(self, request: web.Request) -> web.Response:
        body = await request.json()
        model, path = self._base, body.get("model_path")
        if path:
            found = self._checkpoint(path, "sampler_weights")
            if found is None:
                return _no(404, f"checkpoint {path} not found")
            model = Adapter.load(self._base, found, optimizer=False).model()
        name = f"{body['session_id']}:sample:{body['sampling_session_seq_id']}"
        self._samplers[name] = _Sampler(EmbeddedPolicy(model, self._tokenizer, 0), path, body["session_id"])
        return web.json_response({"type": "create_sampling_session", "sampling_session_id": name})

    async def _get_sampler(self, request: web.Request) -> web.Response:
        name = request.match_info["sampler"]
        if name not in self._samplers:
            return _no(404, "no such sampler")
        return web.json_response({"sampler_id": name, "base_model": MODEL, "model_path": self._samplers[name].path})

    async def _asample(self, request: web.Request) -> web.Response:
        body = await request.json()
        sampler = self._samplers.get(body["sampling_session_id"])
        if sampler is None:
            return _no(404, "no such sampling session")
        prompt = tuple(token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"])
        params, count = body["sampling_params"], body.get("num_samples", 1)
        longest = params.get("max_tokens") or 16
        if len(prompt) + longest > self.context:
            return _no(
                400,
                "Prompt length plus max_tokens exceeds the model's context window: "
                f"{len(prompt)} + {longest} > {self.context}",
            )
        ids = [f"{body['sampling_session_id']}:{body['seq_id']}:{i}" for i in range(count)]
        nan = self._fault(request).nan

        async def sample() -> bytes:
            cached = max((common(prompt, known) for known in sampler.known), default=0)
            self.cached.append(min(cached, len(prompt) - 1))
            out = pb.SampleResponse(prompt_cache_hit_tokens=self.cached[-1])
            for number in range(count):
                seed = params["seed"] + number if params.get("seed") is not None else np.random.randint(1 << 31)
                law = SamplingParams(params.get("temperature", 1.0), longest, seed)
                turn = await sampler.policy.complete(prompt, law)
                sampler.known = [*sampler.known, (*prompt, *turn.ids)][-REMEMBERED:]
                end = pb.STOP_REASON_STOP if turn.stop_reason == "stop" else pb.STOP_REASON_LENGTH
                found = out.sequences.add(stop_reason=end)
                found.tokens = np.array(turn.ids, np.int32).tobytes()
                found.logprobs = np.array([np.nan] * len(turn.ids) if nan else turn.logprobs, np.float32).tobytes()
            return bytes(out.SerializeToString())

        return self._later(request, sample(), sample_sequence_ids=ids)

    # ------------------------------------------------------------------------------------------ results

    def _fault(self, request: web.Request) -> Fault:
        return request.get(FAULT) or Fault("")

    async def _ready(self, value: Any) -> Any:
        return value

    def _later(self, request: web.Request, work: Any, **more: Any) -> web.Response:
        """The promise of a result."""
        fault = self._fault(request)

        async def result() -> Any:
            if fault.hang:
                await asyncio.Event().wait()
            if fault.error:
                work.close()
                return {"error": "injected", "category": fault.error}
            return await work

        name = uuid.uuid4().hex
        self._futures[name] = asyncio.ensure_future(result())
        return web.json_response({"request_id": name, **more})

    def _in_order(self, request: web.Request, name: str, number: int, work: Callable[[_Run], Any]) -> web.Response:
        """Do the work when everything before it in the sequence is done; a gap is waited for without end."""
        run = self._runs.get(name)
        if run is None:
            return _no(404, f"model {name} not found")
        if (name, number) in self._asked:
            return web.json_response(self._asked[name, number])

        async def turn() -> Any:
            async with run.moved:
                await run.moved.wait_for(lambda: run.next >= number)
            await asyncio.sleep(self.latency)
            try:
                return await asyncio.to_thread(self._locked, work, run)
            finally:
                async with run.moved:
                    run.next = max(run.next, number + 1)
                    run.moved.notify_all()

        promised = self._later(request, turn())
        self._asked[name, number] = json.loads(promised.text or "{}")
        return promised

    def _locked(self, work: Callable[[_Run], Any], run: _Run) -> Any:
        with self._compute:
            return work(run)

    async def _retrieve(self, request: web.Request) -> web.Response:
        name = (await request.json())["request_id"]
        future = self._futures.get(name)
        if future is None:
            return _no(404, "unknown request")
        done, _ = await asyncio.wait([future], timeout=5)
        if not done:
            again = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return web.json_response(again, status=408)
        if future.cancelled():
            return _no(410, "cancelled")
        if error := future.exception():
            category = "user" if isinstance(error, Refused) else "server"
            return web.json_response({"error": str(error) or repr(error), "category": category})
        value = future.result()
        return web.Response(body=value, content_type=PROTO) if isinstance(value, bytes) else web.json_response(value)

    # ------------------------------------------------------------------------------------------ checkpoints

    def _place(self, path: str) -> Path:
        return self._folder / path.removeprefix("tinker://").replace(":", "_")

    def _live_for(self, place: Path, seconds: float | None) -> None:
        until = None if seconds is None else self._clock() + seconds
        place.with_name(place.name + ".life").write_text(json.dumps(until))

    def _checkpoint(self, path: str, kind: str) -> Path | None:
        """The file of a checkpoint of the right kind that has not expired."""
        place = self._place(path)
        life = place.with_name(place.name + ".life")
        if f"/{kind}/" not in path or not place.exists():
            return None
        until = json.loads(life.read_text())
        return place if until is None or self._clock() < until else None

    def _any(self, request: web.Request) -> tuple[str, Path | None]:
        path = f"tinker://{request.match_info['run']}/{request.match_info['checkpoint']}"
        kind = request.match_info["checkpoint"].partition("/")[0]
        return path, self._checkpoint(path, kind)

    async def _weights_info(self, request: web.Request) -> web.Response:
        path = (await request.json())["tinker_path"]
        if self._checkpoint(path, path.split("/")[3]) is None:
            return _no(404, f"checkpoint {path} not found")
        return web.json_response({"base_model": MODEL, "is_lora": True, "lora_rank": 8})

    async def _list(self, request: web.Request) -> web.Response:
        run = request.match_info["run"]
        found = []
        for life in sorted((self._folder / run.replace(":", "_")).rglob("*.life")):
            kind, name = life.parent.name, life.name.removesuffix(".life")
            found.append(
                {"checkpoint_id": f"{kind}/{name}", "checkpoint_type": "training" if kind == "weights" else "sampler",
                 "time": "2026-01-01T00:00:00Z", "tinker_path": f"tinker://{run}/{kind}/{name}"}
            )  # fmt: skip
        return web.json_response({"checkpoints": found})

    async def _delete(self, request: web.Request) -> web.Response:
        path, place = self._any(request)
        if place is None:
            return _no(404, f"checkpoint {path} not found")
        place.unlink()
        return web.Response(status=204)

    async def _set_ttl(self, request: web.Request) -> web.Response:
        path, place = self._any(request)
        if place is None:
            return _no(404, f"checkpoint {path} not found")
        self._live_for(place, (await request.json()).get("ttl_seconds"))
        return web.json_response({})

    async def _external_urls(self, request: web.Request) -> web.Response:
        path, place = self._any(request)
        if place is None:
            return _no(404, f"checkpoint {path} not found")
        names = sorted(file.name for file in place.iterdir())
        urls = {name: f"{self.url}/files/{(place / name).relative_to(self._folder)}?signature=x" for name in names}
        return web.json_response({"urls": urls, "expires": "2099-01-01T00:00:00Z"})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(self._folder / request.match_info["name"])


def _no(status: int, detail: str) -> web.Response:
    return web.json_response({"detail": detail}, status=status)


@contextlib.contextmanager
def tinker_server(folder: Path, **options: Any) -> Iterator[TinkerServer]:
    """A server on a free port of 127.0.0.1 that keeps its checkpoints in ``folder``: another one there has them, too.

    Args:
        folder: made when it isn't there.
        options: ``context`` in tokens, ``clock`` for the life of checkpoints.
    """
    server = TinkerServer(folder, **options)
    server.start()
    try:
        yield server
    finally:
        server.stop()
