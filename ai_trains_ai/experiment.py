"""`Experiment`: composition of parts, and the way in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve

from ai_trains_ai.blocking import run_blocking
from ai_trains_ai.configuration import describe, revive
from ai_trains_ai.environments.versions import require_verifiers
from ai_trains_ai.errors import ConfigurationError, NoCapacity, PluginSetChanged, RunFolderError
from ai_trains_ai.events import Event, StepFinished
from ai_trains_ai.interfaces import InnerJobRunner, OuterTrainer, TaskFamily
from ai_trains_ai.loop.settings import LoopSettings, Parts, limited
from ai_trains_ai.plugins import Hooks, Plugins, Registry, Spec, differences, manifest
from ai_trains_ai.records import Budget, Checkpoint, Exported, PodRequest, SamplingParams, Task
from ai_trains_ai.report.run import Run
from ai_trains_ai.session import open_context
from ai_trains_ai.store import RunFolder, Store
from ai_trains_ai.threads import single_thread, usable_cores

if TYPE_CHECKING:
    from ai_trains_ai.fleet.forecast import Forecast, Machines, Plan
    from ai_trains_ai.loop import OuterLoop

logger = logging.getLogger(__name__)

PARTS = {"outer": "outer_trainer", "inner": "job_runner", "reward": "reward", "sandbox": "sandbox"}
LISTS = {
    "families": "task_family",
    "held_out": "task_family",
    "trackers": "tracker",
    "integrity_checks": "integrity_check",
}


class Experiment:
    """A nested-RL experiment, composed of parts.

    Every part is given as an instance, a class, a registered name ("embedded", or "distribution:name"),
    "module:attr", or a spec such as ``ata.job_runner("embedded", slots=4)``. Parts are made anew for each run.

    Args:
        outer: the outer trainer (or a policy that only acts).
        inner: the runner of inner jobs.
        families: families whose tasks train the outer policy.
        held_out: families that never do, and on which it is measured before and after.
        reward: pays episodes.
        sandbox: where agent code is validated (and, embedded, trained).
        trackers: where metrics go, besides ``metrics.jsonl``.
        integrity_checks: look for cheating before an episode is paid.
        budget: hard limit on money.
        plugins: plugin objects (instances or modules), for instance an `EventHandler`; besides the installed ones.
        strict: raise `PluginError` for any fault of any plugin, instead of leaving it out.
        required: plugins, by their name or distribution, without which the experiment is not made.
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
        integrity_checks: Sequence[Any] = (),
        budget: Budget | None = None,
        plugins: Sequence[object] | Registry = (),
        strict: bool = False,
        required: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        self._given: dict[str, Any] = {"outer": outer, "inner": inner, "reward": reward, "sandbox": sandbox}
        lists = {"families": families, "held_out": held_out, "trackers": trackers, "integrity_checks": integrity_checks}
        self._given |= {name: _list(name, given) for name, given in lists.items()}
        if not self._given["families"]:
            raise ConfigurationError("An experiment needs at least one family to train on.")
        known = LoopSettings.__attrs_attrs__
        unknown = set(settings) - {a.name for a in known}
        if unknown:
            raise ConfigurationError(
                f"Experiment has no setting {', '.join(sorted(unknown))}. Settings: {', '.join(a.name for a in known)}."
            )
        self.settings = LoopSettings(**settings)
        self.budget = _checked(budget or Budget())
        if not isinstance(plugins, Registry):  # `resume` has looked at them before
            plugins = Registry(plugins, strict=strict, required=required)
        self.registry: Registry = plugins
        self._plugin_rules = {"strict": strict, "required": list(required or ())}
        self._resuming: RunFolder | None = None
        self._stop: Callable[[], None] | None = None
        self._families()  # a misspelt family fails here, not after the run has started

    @classmethod
    def embedded(cls, **changes: Any) -> Experiment:
        """Both loops for real on this machine's CPU: no key, no network, no GPU. ``changes`` replace any argument.

        Asks NumPy for one BLAS thread a process (by environment variable) unless the user chose otherwise.
        """
        if not single_thread():
            logger.warning(
                "NumPy was imported before with several BLAS threads a process, which fight for the cores: set "
                "OPENBLAS_NUM_THREADS=1 (and OMP_, MKL_NUM_THREADS) before the first import to run faster."
            )
        defaults: dict[str, Any] = {
            "outer": Spec("outer_trainer", "embedded"),
            "inner": Spec("job_runner", "embedded"),
            "families": ["chained-arithmetic", "multi-hop"],
            "held_out": ["triage"],
            "max_tokens": 128,  # twice the longest turn that makes sense; what goes astray ends early
        }
        return cls(**(defaults | changes))

    @property
    def plugins(self) -> Plugins:
        """Every plugin with its status; a table in a notebook."""
        return self.registry.plugins

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
        steps = self._steps(steps)
        return await self._execute({"steps": steps}, lambda loop: loop.run(steps), out, on_event)

    async def evaluate(
        self,
        episodes: int | None = None,
        *,
        out: str | Path | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> Run:
        """Let the outer policy play ``episodes`` on every task, and train nothing. Its row is `report.leaderboard.row`.

        Args:
            episodes: on each task; a resumed evaluation may leave it out.
            out: the run folder; default ``runs/<time>``. It must not hold a run yet.
            on_event: called with every event, in the run's thread.

        Raises:
            RunInterrupted: as `run` does.
        """
        episodes = self.evaluates if episodes is None else episodes
        if not isinstance(episodes, int) or episodes < 1:
            raise ConfigurationError(f"Say how many episodes to play on each task, 1 or more, not {episodes!r}.")
        count = episodes
        return await self._execute({"steps": 0, "evaluate": count}, lambda loop: loop.evaluate(count), out, on_event)

    @property
    def evaluates(self) -> int | None:
        """Episodes on each task when this resumes an evaluation; else ``None``."""
        return None if self._resuming is None else self._resuming.read_config().get("evaluate")

    def evaluate_sync(self, episodes: int | None = None, **options: Any) -> Run:
        """`evaluate` for scripts; also works in a notebook cell."""
        return run_blocking(self.evaluate(episodes, **options), self.stop)

    async def _execute(
        self,
        plan: Mapping[str, int],
        play: Callable[[OuterLoop], Awaitable[None]],
        out: str | Path | None,
        on_event: Callable[[Event], None] | None,
    ) -> Run:
        from ai_trains_ai.validation import PRELOAD

        require_verifiers()
        folder = self._folder(out)
        if self._resuming is None:
            folder.require_new()
        usage = _Usage()
        watching = [] if on_event is None else [("on_event", on_event)]
        parts = self._parts(watching)  # a wrong part fails here, before anything is written
        parts.sandbox.preload(*PRELOAD, *parts.runner.sandbox_preload)
        async with contextlib.AsyncExitStack() as stack:
            # before the folder: where agent code runs was started when there was no secret, policy or database yet
            stack.push_async_callback(parts.sandbox.close)
            await parts.sandbox.start()
            if self._resuming is None:
                folder.create(self._config(plan))
            stack.enter_context(folder.writer())
            folder.write_plugins(manifest(self.plugins))
            store = Store.open(folder.database) if self._resuming else Store.create(folder.database)
            stack.callback(store.close)
            tasks = [*parts.tasks, *parts.held_out]
            store.set_meta(steps=plan["steps"], families={task.id: task.family for task in tasks})
            usage.keep_in(store, parts.hooks)
            stack.callback(usage.save)
            await self._run_loop(folder, store, parts, play, usage)
        return Run(folder.path)

    def run_sync(self, steps: int | None = None, **options: Any) -> Run:
        """`run` for scripts; also works in a notebook cell. The first Ctrl-C drains, the second stops at once."""
        return run_blocking(self.run(steps, **options), self.stop)

    def stop(self) -> bool:
        """Drain the run that goes on: start nothing new, let episodes in flight end. Call it in the run's loop.

        Returns whether there was one to drain: not before its parts are made, nor after its end.
        """
        if self._stop is None:
            return False
        self._stop()
        return True

    async def _run_loop(
        self,
        folder: RunFolder,
        store: Store,
        parts: Parts,
        play: Callable[[OuterLoop], Awaitable[None]],
        usage: _Usage,
    ) -> None:
        from ai_trains_ai.evaluation import HiddenEvaluation
        from ai_trains_ai.families.hidden import reserved
        from ai_trains_ai.loop import OuterLoop
        from ai_trains_ai.validation import Validator

        seed, keep = self.settings.seed, usage.on_event
        run = open_context(folder, store, parts.sandbox, self.budget, seed, parts.hooks, keep=keep)

        def make_validator() -> Validator:
            surface, models = parts.runner.config_surface(), parts.runner.base_models()
            return Validator(parts.sandbox, surface, models, reserved=reserved, review=parts.hooks.review_submission)

        evaluation = HiddenEvaluation(
            parts.families,
            folder.secret(),
            n=self.settings.eval_items,
            params=SamplingParams(max_tokens=self.settings.eval_tokens),
        )
        loop = OuterLoop(parts, self.settings, run, make_validator, evaluation)
        self._stop = loop.stop
        with _interrupts(loop.stop):
            try:
                self._open_trackers(folder, store, parts)
                await play(loop)
            finally:
                self._stop = None
                for tracker in parts.trackers:
                    tracker.close()

    @staticmethod
    def _open_trackers(folder: RunFolder, store: Store, parts: Parts) -> None:
        for tracker in parts.trackers:
            tracker.open(folder.path, folder.path.name, folder.read_config())
            for step in store.steps():  # a step may have been stored and not logged when a run was killed
                tracker.log(int(step["step"]), {key: value for key, value in step.items() if "/" in key})

    # ------------------------------------------------------------------------------------------ export

    async def export(self, folder: str | Path, *, checkpoint: str | None = None, license: str = "") -> Exported:
        """Write a resumed run's outer policy into ``folder`` for others, with its model card as ``README.md``.

        Args:
            folder: made when it isn't there. The same export may be repeated into it.
            checkpoint: name of one of the run's checkpoints; default the one that was chosen at its end.
            license: identifier for the card.

        Raises:
            ConfigurationError: the experiment is no run yet, or has no such checkpoint.
            RunFolderError: the run is going on in another process.
            PolicyError, StorageError: the checkpoint is gone, or the disk refuses.
        """
        from ai_trains_ai.report.model_card import model_card, write_card

        if self._resuming is None:
            raise ConfigurationError("Only a run has a checkpoint: ata.resume(folder).export(…).")
        outer = self.registry.resolve("outer_trainer", self._given["outer"])
        if not isinstance(outer, OuterTrainer):
            raise ConfigurationError(f"{type(outer).__name__} trains nothing, and so has nothing to export.")
        run_folder, target = self._resuming, Path(folder)
        run = Run(run_folder.path)
        found = _checkpoint(run, checkpoint)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(run_folder.writer())
            store = stack.enter_context(contextlib.closing(Store.open(run_folder.database)))
            sandbox = self.registry.resolve("sandbox", self._given["sandbox"])  # of the context; never started
            hooks = Hooks(self.registry.manager, [])
            context = open_context(run_folder, store, sandbox, self.budget, self.settings.seed, hooks)
            stack.push_async_callback(outer.close)
            await outer.start(context, found)
            exported: Exported = await outer.export(found, target)
        card = model_card(run, checkpoint=found if checkpoint else None, exported=exported, license=license)
        write_card(target, card)
        return exported

    def export_sync(self, folder: str | Path, **options: Any) -> Exported:
        """`export` for scripts; also works in a notebook cell."""
        return run_blocking(self.export(folder, **options))

    # ------------------------------------------------------------------------------------------ forecast

    async def forecast(
        self, steps: int | None = None, *, minutes_per_job: Any = None, request: PodRequest | None = None
    ) -> Forecast:
        """What `run` would cost from here on, and how long it would take, each with a range. Starts and rents nothing.

        Args:
            steps: as for `run`; of a resumed run, only what is still ahead counts.
            minutes_per_job: a number, or (low, expected, high); default this run's own jobs, else the tasks' time
                limit.
            request: the machines to ask prices of; default those that the runner rents.

        Raises:
            NoCapacity: the runner's provider has no machine of that kind.
        """
        from ai_trains_ai.fleet.forecast import Known, forecast

        known, done = Known(), 0
        if self._resuming is not None:
            with contextlib.closing(Store.open(self._resuming.database, write=False)) as store:
                known, done = Known.of(store), len(store.steps())
        runner: InnerJobRunner = self.registry.resolve("job_runner", self._given["inner"])
        return forecast(
            self._plan(self._steps(steps), done, runner),
            await self._machines(request or runner.request, runner),
            known,
            minutes_per_job=minutes_per_job,
            usd=self.budget.usd,
            usd_per_hour=self.budget.usd_per_hour,
        )

    def forecast_sync(self, steps: int | None = None, **options: Any) -> Forecast:
        """`forecast` for scripts; also works in a notebook cell."""
        return run_blocking(self.forecast(steps, **options))

    def _plan(self, steps: int, done: int, runner: InnerJobRunner) -> Plan:
        """What is ahead when ``done`` of ``steps`` updates are made."""
        from ai_trains_ai.fleet.forecast import Plan

        settings, (_, tasks, held_out) = self.settings, self._families()
        ahead = max(0, steps - done)
        between = len(range(done, steps, settings.probe_every)) - 1 if settings.probe_every else 0
        probes = len(held_out) * (between + (1 if done else 2)) if settings.probe_episodes else 0
        groups = ahead * settings.groups_per_step
        going = settings.groups_per_step + (settings.max_staleness > 0)
        return Plan(
            steps=ahead,
            groups=groups + probes,
            episodes=groups * settings.group_size + probes * settings.probe_episodes,
            in_flight=going * settings.group_size,
            limit=sum(limited(task, runner).limits.seconds for task in tasks) / len(tasks) / 60,
        )

    async def _machines(self, request: PodRequest, runner: InnerJobRunner) -> Machines:
        """What the runner's jobs would run on, and its price now."""
        from ai_trains_ai.fleet.forecast import Machines, provider_of

        given = self._given["inner"]
        provider = provider_of(runner)
        if provider is None:
            slots = given.arguments.get("slots") if isinstance(given, Spec) else None
            return Machines(slots=slots, source=f"slots={slots}") if slots else Machines(slots=usable_cores())
        try:
            offers = await provider.offers(request)
        finally:
            await provider.close()
        if not offers:
            raise NoCapacity(f"{type(provider).__name__} has no machine for {request}. Ask for another type.")
        return Machines(offers, provider.max_pods)

    # ------------------------------------------------------------------------------------------ composition

    def _families(self) -> tuple[dict[str, TaskFamily], list[Task], list[Task]]:
        train = [self.registry.resolve("task_family", family) for family in self._given["families"]]
        held_out = [self.registry.resolve("task_family", family) for family in self._given["held_out"]]
        both = {family.name for family in train} & {family.name for family in held_out}
        if both:
            raise ConfigurationError(f"{', '.join(sorted(both))} can't be trained on and held out at once.")
        given = [family.name for family in [*train, *held_out]]
        if twice := {name for name in given if given.count(name) > 1}:
            raise ConfigurationError(f"{', '.join(sorted(twice))} is given twice, or two families share that name.")
        families = {family.name: family for family in [*train, *held_out]}

        def tasks(found: Sequence[TaskFamily]) -> list[Task]:
            attempts = self.settings.attempts
            return [evolve(t, limits=evolve(t.limits, attempts=attempts)) for family in found for t in family.tasks()]

        if not tasks(train):
            names = ", ".join(family.name for family in train)
            raise ConfigurationError(f"{names}: tasks() gives no task to train on. A family needs at least one.")
        return families, tasks(train), tasks(held_out)

    def _parts(self, watching: Sequence[tuple[str, Callable[[Event], None]]]) -> Parts:
        resolve = self.registry.resolve
        families, tasks, held_out = self._families()
        runner: InnerJobRunner = resolve("job_runner", self._given["inner"])
        tasks, held_out = ([limited(task, runner) for task in found] for found in (tasks, held_out))
        return Parts(
            outer=resolve("outer_trainer", self._given["outer"]),
            runner=runner,
            reward=resolve("reward", self._given["reward"]),
            sandbox=resolve("sandbox", self._given["sandbox"]),
            families=families,
            tasks=tasks,
            held_out=held_out,
            trackers=[resolve("tracker", t) for t in ["jsonl", *self._given["trackers"]]],
            integrity_checks=[resolve("integrity_check", check) for check in self._given["integrity_checks"]],
            hooks=Hooks(self.registry.manager, watching),
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
        if self.evaluates is not None:
            raise ConfigurationError("This run is an evaluation, which has no steps. Go on with evaluate().")
        if steps is None:
            if self._resuming is None:
                raise ConfigurationError("Say how many steps to run: experiment.run(steps=20).")
            store = Store.open(self._resuming.database, write=False)
            with contextlib.closing(store):
                steps = int(store.meta("steps") or self._resuming.read_config()["steps"])
        if not isinstance(steps, int):
            raise ConfigurationError(f"steps must be a whole number, not {steps!r}.")
        if steps < 1:
            raise ConfigurationError(f"steps must be at least 1, not {steps}.")
        return steps

    def _config(self, plan: Mapping[str, int]) -> dict[str, Any]:
        config: dict[str, Any] = {**plan, "settings": asdict(self.settings)}
        config["plugins"] = self._plugin_rules
        config["budget"] = {k: v for k, v in asdict(self.budget).items() if v is not None}
        config["parts"] = {name: describe(self._given[name]) for name in PARTS}
        config["parts"] |= {name: [describe(part) for part in self._given[name]] for name in LISTS}
        return config


def resume(
    path: str | Path,
    *,
    plugins: Sequence[object] = (),
    strict: bool | None = None,
    required: Sequence[str] | None = None,
    accept_plugins: bool = False,
    budget: Budget | None = None,
    health: Mapping[str, Mapping[str, float]] | None = None,
    **parts: Any,
) -> Experiment:
    """The experiment of a run folder, ready to go on: ``await ata.resume("runs/x").run()``.

    ``parts`` (and ``budget``, ``health``, ``strict``, ``required``) replace what the run was started with; parts that
    were instances or classes must be given again, and so must plugins that were passed by hand.

    Raises:
        PluginSetChanged: other plugins are installed or passed than when the run was last going on;
            ``accept_plugins=True`` goes on with those of now.
        RunFolderError: the folder is no run, or of another version.
    """
    unknown = set(parts) - {*PARTS, *LISTS}
    if unknown:
        raise ConfigurationError(
            f"resume() takes no {', '.join(sorted(unknown))}. "
            f"It takes {', '.join([*PARTS, *LISTS])}, budget, health, plugins, strict, required and accept_plugins."
        )
    folder = RunFolder(Path(path)).require()
    Store.open(folder.database, write=False).close()
    config = folder.read_config()
    try:
        # a run of before there were plugins and checks has none
        kept = {"strict": False, "required": [], **config.get("plugins", {})}
        written = {name: [] for name in LISTS} | config["parts"]
        kept_budget, settings = Budget(**config["budget"]), config["settings"]
        kinds = PARTS | LISTS
        described = {name: written[name] for name in kinds if name not in parts}
    except (KeyError, TypeError) as error:
        raise RunFolderError(f"{folder.config} lacks {error}; it was not written by this version.") from None
    if health is not None:
        settings |= {"health": health}
    strict = kept["strict"] if strict is None else strict
    required = kept["required"] if required is None else required
    registry = Registry(plugins)
    changed = differences(folder.read_plugins(), manifest(registry.plugins))
    if changed and not accept_plugins:
        raise PluginSetChanged(
            f"{folder.path} ran with other plugins: {'; '.join(changed)}. Install or pass the same ones "
            "(ata.resume(path, plugins=[…])), or go on with those of now: ata.resume(path, accept_plugins=True), "
            "on the command line --accept-plugins. A part that a missing plugin made must then be replaced: "
            "ata.resume(path, accept_plugins=True, reward=…)."
        )
    registry.require(required, strict=strict)
    given = parts | {name: revive(name, kinds[name], part) for name, part in described.items()}
    experiment = Experiment(
        **given, budget=budget or kept_budget, plugins=registry, strict=strict, required=required, **settings
    )
    experiment._resuming = folder
    return experiment


def _checkpoint(run: Run, name: str | None) -> Checkpoint:
    """One of the run's checkpoints by name, or the one that was chosen when it ended."""
    if name is None:
        if run.checkpoint is None:
            raise ConfigurationError(
                f"{run.path} has not ended, and so has no chosen checkpoint. Finish it, or name one."
            )
        return run.checkpoint[0]
    known = {checkpoint.name: checkpoint for checkpoint in run.checkpoints if checkpoint.path}
    if name not in known:
        listed = ", ".join(known) or "none"
        raise ConfigurationError(f"{run.path} has no checkpoint {name!r}. It has: {listed}.")
    return known[name]


def _checked(budget: Budget) -> Budget:
    """The budget, unless a limit of it is no amount: NaN or a text would compare as if there were none."""
    for name, limit in asdict(budget).items():
        number = isinstance(limit, int | float) and not isinstance(limit, bool)
        if limit is not None and not (number and 0 <= limit < math.inf):
            raise ConfigurationError(f"Budget({name}={limit!r}): give dollars, 0 or more, or None for no limit.")
    return budget


def _list(name: str, given: Any) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigurationError(f"{name} takes a list, not {given!r}. Write {name}=[…].")
    return list(given)


class _Usage:
    """Wall and CPU seconds of a run, and its plugins' failures, over all sessions; saved after every step, so that a
    killed session counts too.

    The CPU time of children is known once they have ended; that of a killed session's sandbox is lost.
    """

    def __init__(self) -> None:
        self._start = (time.monotonic(), self._cpu())

    def keep_in(self, store: Store, hooks: Hooks) -> None:
        """Add to what earlier sessions stored."""
        self._store, self._hooks = store, hooks
        self._before = (store.meta("wall_seconds", 0.0), store.meta("cpu_seconds", 0.0))
        self._failed: dict[str, dict[str, Any]] = store.meta("plugin_failures", {})

    @staticmethod
    def _cpu() -> float:
        usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    def save(self) -> None:
        wall, busy = time.monotonic() - self._start[0], self._cpu() - self._start[1]
        self._store.set_meta(
            wall_seconds=self._before[0] + wall,
            cpu_seconds=self._before[1] + busy,
            cores=usable_cores(),
            plugin_failures=self._failures(),
        )

    def _failures(self) -> dict[str, dict[str, Any]]:
        """What plugins raised in all sessions."""
        total = {name: dict(failure) for name, failure in self._failed.items()}
        for name, failure in self._hooks.failures.items():
            known = total.setdefault(name, {"count": 0, "first": failure.first})
            known["count"] += failure.count
        return total

    def on_event(self, event: Event) -> None:
        if isinstance(event, StepFinished):
            self.save()


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
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was set in C
