"""`Experiment`: composition of parts, and the way in."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from attrs import asdict

from ai_trains_ai.blocking import run_blocking
from ai_trains_ai.environments.versions import require_verifiers
from ai_trains_ai.errors import ConfigurationError, RunFolderError
from ai_trains_ai.events import Event
from ai_trains_ai.interfaces import TaskFamily
from ai_trains_ai.loop.settings import LoopSettings, Parts
from ai_trains_ai.plugins import Registry, Spec
from ai_trains_ai.records import Budget, Task
from ai_trains_ai.report.run import Run
from ai_trains_ai.session import Observers, open_context
from ai_trains_ai.store import RunFolder, Store
from ai_trains_ai.threads import single_thread, usable_cores

PARTS = {"outer": "outer_trainer", "inner": "job_runner", "reward": "reward", "sandbox": "sandbox"}
LISTS = {"families": "task_family", "held_out": "task_family", "trackers": "tracker"}


class Experiment:
    """A nested-RL experiment, composed of parts.

    Every part is given as an instance, a class, a registered name, "module:attr" or a spec such as
    ``ata.job_runner("embedded", slots=4)``. Parts are made anew for each run.

    Args:
        outer: the outer trainer (or a policy that only acts).
        inner: the runner of inner jobs.
        families: families whose tasks train the outer policy.
        held_out: families that never do, and on which it is measured before and after.
        reward: pays episodes.
        sandbox: where agent code is validated (and, embedded, trained).
        trackers: where metrics go, besides ``metrics.jsonl``.
        budget: hard limit on money.
        plugins: plugin objects, for instance observers with an ``on_event`` hook.
        settings: fields of `LoopSettings`.
    """

    def __init__(
        self,
        *,
        outer: Any,
        inner: Any,
        families: Sequence[Any],
        held_out: Sequence[Any] = (),
        reward: Any = "hybrid",
        sandbox: Any = "bubblewrap",
        trackers: Sequence[Any] = (),
        budget: Budget | None = None,
        plugins: Sequence[object] = (),
        **settings: Any,
    ) -> None:
        if not families:
            raise ConfigurationError("An experiment needs at least one family to train on.")
        known = LoopSettings.__attrs_attrs__
        unknown = set(settings) - {a.name for a in known}
        if unknown:
            raise ConfigurationError(
                f"Experiment has no setting {', '.join(sorted(unknown))}. Settings: {', '.join(a.name for a in known)}."
            )
        self.settings = LoopSettings(**settings)
        self.budget = budget or Budget()
        self.registry = Registry(plugins)
        self._given: dict[str, Any] = {"outer": outer, "inner": inner, "reward": reward, "sandbox": sandbox}
        self._given |= {"families": list(families), "held_out": list(held_out), "trackers": list(trackers)}
        self._resuming: RunFolder | None = None
        self._families()  # a misspelt family fails here, not after the run has started

    @classmethod
    def embedded(cls, **changes: Any) -> Experiment:
        """Both loops for real on this machine's CPU: no key, no network, no GPU. ``changes`` replace any argument."""
        single_thread()
        defaults: dict[str, Any] = {
            "outer": Spec("outer_trainer", "embedded"),
            "inner": Spec("job_runner", "embedded"),
            "families": ["chained-arithmetic", "multi-hop"],
            "held_out": ["triage"],
        }
        return cls(**(defaults | changes))

    # ------------------------------------------------------------------------------------------ running

    async def run(
        self,
        steps: int | None = None,
        *,
        out: str | Path | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> Run:
        """Train the outer policy until ``steps`` updates are done, and return the run.

        Args:
            steps: updates of the outer policy in all; a resumed run may leave it out.
            out: the run folder; default ``runs/<time>``. It must not hold a run yet.
            on_event: called with every event, in the run's thread.

        Raises:
            RunInterrupted: after Ctrl-C, once episodes in flight have ended; a second Ctrl-C stops at once.
        """
        require_verifiers()
        folder, steps = self._folder(out), self._steps(steps)
        with contextlib.ExitStack() as stack:
            if self._resuming is None:
                folder.create(self._config(steps))
            stack.enter_context(folder.writer())
            store = Store.open(folder.database) if self._resuming else Store.create(folder.database)
            stack.callback(store.close)
            observers = Observers(self.registry.observers())
            if on_event is not None:
                observers = Observers([*self.registry.observers(), ("on_event", on_event)])
            await self._run_loop(folder, store, steps, observers)
        return Run(folder.path)

    def run_sync(self, steps: int | None = None, **options: Any) -> Run:
        """`run` for scripts; also works in a notebook cell."""
        return run_blocking(self.run(steps, **options))

    async def _run_loop(self, folder: RunFolder, store: Store, steps: int, observers: Observers) -> None:
        from ai_trains_ai.evaluation import HiddenEvaluation
        from ai_trains_ai.families.hidden import reserved
        from ai_trains_ai.loop import OuterLoop
        from ai_trains_ai.validation import Validator

        parts = self._parts()
        parts.sandbox.preload(*parts.runner.sandbox_preload)
        run = open_context(folder, store, parts.sandbox, self.budget, self.settings.seed, observers)
        surface, models = parts.runner.config_surface(), parts.runner.base_models()
        validator = Validator(parts.sandbox, surface, models, reserved=reserved)
        evaluation = HiddenEvaluation(parts.families, folder.secret(), n=self.settings.eval_items)
        for tracker in parts.trackers:
            tracker.open(folder.path, folder.path.name, folder.read_config())
        loop = OuterLoop(parts, self.settings, run, validator, evaluation)
        with _usage(store), _interrupts(loop.stop):
            try:
                await loop.run(steps)
            except BaseExceptionGroup as group:
                raise _first(group) from group
            finally:
                for tracker in parts.trackers:
                    tracker.close()
        store.set_meta(observer_failures=dict(observers.failures))

    # ------------------------------------------------------------------------------------------ composition

    def _families(self) -> tuple[dict[str, TaskFamily], list[Task], list[Task]]:
        train = [self.registry.resolve("task_family", family) for family in self._given["families"]]
        held_out = [self.registry.resolve("task_family", family) for family in self._given["held_out"]]
        both = {family.name for family in train} & {family.name for family in held_out}
        if both:
            raise ConfigurationError(f"{', '.join(sorted(both))} can't be trained on and held out at once.")
        families = {family.name: family for family in [*train, *held_out]}
        return families, [t for f in train for t in f.tasks()], [t for f in held_out for t in f.tasks()]

    def _parts(self) -> Parts:
        resolve = self.registry.resolve
        families, tasks, held_out = self._families()
        return Parts(
            outer=resolve("outer_trainer", self._given["outer"]),
            runner=resolve("job_runner", self._given["inner"]),
            reward=resolve("reward", self._given["reward"]),
            sandbox=resolve("sandbox", self._given["sandbox"]),
            families=families,
            tasks=tasks,
            held_out=held_out,
            trackers=[resolve("tracker", t) for t in ["jsonl", *self._given["trackers"]]],
        )

    def total_steps(self, steps: int | None = None) -> int:
        """Updates that `run` would come to; a resumed run remembers its number."""
        return self._steps(steps)

    def _folder(self, out: str | Path | None) -> RunFolder:
        if self._resuming is not None:
            if out is not None and Path(out) != self._resuming.path:
                raise ConfigurationError(f"This experiment resumes {self._resuming.path}; it can't write to {out}.")
            return self._resuming
        return RunFolder(Path(out) if out else Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S"))

    def _steps(self, steps: int | None) -> int:
        if steps is None:
            if self._resuming is None:
                raise ConfigurationError("Say how many steps to run: experiment.run(steps=20).")
            steps = int(self._resuming.read_config()["steps"])
        if steps < 1:
            raise ConfigurationError(f"steps must be at least 1, not {steps}.")
        return steps

    def _config(self, steps: int) -> dict[str, Any]:
        config: dict[str, Any] = {"steps": steps, "settings": asdict(self.settings)}
        config["budget"] = {k: v for k, v in asdict(self.budget).items() if v is not None}
        config["parts"] = {name: _describe(self._given[name]) for name in PARTS}
        config["parts"] |= {name: [_describe(part) for part in self._given[name]] for name in LISTS}
        return config


def resume(path: str | Path, *, plugins: Sequence[object] = (), **parts: Any) -> Experiment:
    """The experiment of a run folder, ready to go on: ``await ata.resume("runs/x").run()``.

    ``parts`` replace what the run was started with; parts that were instances or classes without an importable name
    must be given again. Raises `RunFolderError` when the folder is no run or of another version.
    """
    folder = RunFolder(Path(path)).require()
    Store.open(folder.database, write=False).close()
    config = folder.read_config()
    given: dict[str, Any] = {}
    try:
        for name in [*PARTS, *LISTS]:
            given[name] = parts[name] if name in parts else _revive(name, config["parts"][name])
        experiment = Experiment(**given, budget=Budget(**config["budget"]), plugins=plugins, **config["settings"])
    except KeyError as error:
        raise RunFolderError(f"{folder.config} lacks {error}; it was not written by this version.") from None
    experiment._resuming = folder
    return experiment


def _describe(part: Any) -> Any:
    """A part as the configuration file holds it."""
    if isinstance(part, str):
        return {"name": part}
    if isinstance(part, Spec):
        described: dict[str, Any] = {"name": part.name}
        if part.arguments:
            described["arguments"] = {
                k: {"spec": v.kind, **_describe(v)} if isinstance(v, Spec) else v for k, v in part.arguments.items()
            }
        return described
    kind = part if isinstance(part, type) else type(part)
    return {"instance": f"{kind.__module__}:{kind.__qualname__}"}


def _revive(name: str, described: Any) -> Any:
    if isinstance(described, list):
        return [_revive(name, part) for part in described]
    if "instance" in described:
        raise ConfigurationError(
            f"The run was started with {described['instance']} as {name!r}, which a file can't hold. "
            f"Pass it again: ata.resume(path, {name}=…)."
        )
    kind = PARTS.get(name) or LISTS[name]
    return _spec(kind, described)


def _spec(kind: str, described: Mapping[str, Any]) -> Spec:
    arguments = {
        k: _spec(v["spec"], v) if isinstance(v, Mapping) and "spec" in v else v
        for k, v in described.get("arguments", {}).items()
    }
    return Spec(kind, described["name"], arguments)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first real error in a group: the parts of a run are tasks, but its user called one function."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextlib.contextmanager
def _usage(store: Store) -> Iterator[None]:
    """Add this session's wall and CPU seconds (children included) to the run's."""

    def cpu() -> float:
        usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    wall, busy = time.monotonic(), cpu()
    try:
        yield
    finally:
        store.set_meta(
            wall_seconds=store.meta("wall_seconds", 0.0) + time.monotonic() - wall,
            cpu_seconds=store.meta("cpu_seconds", 0.0) + cpu() - busy,
            cores=usable_cores(),
        )


@contextlib.contextmanager
def _interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """First Ctrl-C drains, the second cancels. Only where signals can be handled: the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    pressed: list[int] = []

    def on_signal() -> None:
        pressed.append(1)
        if len(pressed) == 1:
            stop()
        elif task is not None:
            task.cancel()

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in previous:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number, handler in previous.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
