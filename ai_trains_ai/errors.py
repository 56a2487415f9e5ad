"""One exception tree. Every message says what happened, where, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "Did you mean 'x'?", or nothing when no known name is close."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"Did you mean {close[0]!r}?" if close else ""


class AiTrainsAiError(Exception):
    """Base of everything that this library raises on purpose."""


class ConfigurationError(AiTrainsAiError, ValueError):
    """An argument, option or file that the user wrote is wrong."""


class UnknownName(ConfigurationError):
    """A family, plugin, base model or key that nobody registered."""

    @classmethod
    def of(cls, kind: str, name: str, known: Iterable[str], remedy: str = "") -> UnknownName:
        known = sorted(known)
        hint = did_you_mean(name, known)
        listed = f"Known: {', '.join(known)}." if known else f"No {kind} is registered."
        return cls(" ".join(filter(None, (f"There is no {kind} named {name!r}.", hint, listed, remedy))))


class PluginError(ConfigurationError):
    """A plugin that is broken, missing, or claims a name that is taken."""


class MissingDependency(AiTrainsAiError, ImportError):
    """An optional package is absent, too old or too new."""

    @classmethod
    def of(cls, package: str, extra: str, why: str = "is not installed") -> MissingDependency:
        return cls(f"{package} {why}. Install what this needs with: pip install 'ai-trains-ai[{extra}]'")


class RunFolderError(AiTrainsAiError):
    """A path that is no run folder, or one that this version can't read or write."""


class PluginSetChanged(RunFolderError):
    """A run is resumed with other plugins than it was started with."""


class StorageError(RunFolderError, OSError):
    """The run folder's disk refused a write (full, read-only, gone). What was committed before is intact."""


class SandboxUnavailable(AiTrainsAiError):
    """No sandbox backend works on this machine, or the one in use can't start."""


class SandboxError(AiTrainsAiError):
    """The sandbox itself failed while it ran something: infrastructure, never the agent's fault."""


class WorkspaceError(AiTrainsAiError, ValueError):
    """A path or content that a workspace refuses. The message is shown to the agent."""


class SubmissionRejected(AiTrainsAiError):
    """A submission that was run by hand does not validate. Carries the report as ``.report``."""

    def __init__(self, message: str, report: object) -> None:
        super().__init__(message)
        self.report = report


class InvalidEnvironment(AiTrainsAiError, ValueError):
    """An environment.py that can't be loaded or used. Becomes a finding of the validation."""

    def __init__(self, code: str, message: str, hint: str = "", place: str = "environment.py") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.place = place


class RewardError(AiTrainsAiError, ValueError):
    """A reward or metric of an environment raised, or gave something that is no finite number."""

    def __init__(self, message: str, place: str = "environment.py", code: str = "reward-raises") -> None:
        super().__init__(message)
        self.message = message
        self.place = place
        self.code = code


class UntrustedDataError(AiTrainsAiError, ValueError):
    """Bytes that came out of a sandbox break the protocol, a cap or a range."""


class JobError(AiTrainsAiError):
    """A training job could not be handled as asked (unknown handle, weights gone, wrong state)."""


class PolicyError(AiTrainsAiError):
    """The outer policy can't act or train (context too long, broken weights, non-finite gradients)."""


class ProviderError(AiTrainsAiError):
    """A GPU provider refused or failed. The subclass says what the fleet does about it."""


class NoCapacity(ProviderError):
    """Nothing of the wanted kind is free now. Remedy: another offer, or later."""


class AmbiguousCreate(ProviderError):
    """The answer to a create was lost. Remedy: look for the marker name before any retry."""


class Forbidden(ProviderError):
    """Key missing, wrong, or without the right. Remedy: the user's."""


class OutOfFunds(ProviderError):
    """The provider's account is empty. Remedy: the user's; the fleet drains."""


class Transient(ProviderError):
    """Worth a retry with back-off."""


class TransportError(AiTrainsAiError):
    """A file or command on a machine is not as expected; trying again would not help."""


class Fenced(AiTrainsAiError):
    """Another controller took this machine over: a newer one of the same run. This one may not touch it any more."""


class BudgetExceeded(AiTrainsAiError):
    """A spend would pass the budget. Nothing was started."""


class RunUnhealthy(AiTrainsAiError):
    """A metric of the outer training crossed the threshold at which the run ends. What was done is kept."""


class RunInterrupted(AiTrainsAiError):
    """The run was stopped by the user and drained. The message says how to go on."""
