"""The taskset of the engine's own processes: the frozen rows, and nothing of the agent's.

Launcher, orchestrator and pre-flight find it under the name of the agent's taskset (``ata_job``). ``ATA_ROWS`` names
the file, one JSON object a line. The env server, which alone has the agent's types, gets each row as it stands there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import ConfigDict, SerializerFunctionWrapHandler, model_serializer

__all__ = ["FrozenRows"]


class AnyTaskConfig(vf.TaskConfig):
    """The ``task`` table of the agent's config, whatever is in it."""

    model_config = ConfigDict(extra="allow")

    @model_serializer(mode="wrap")
    def _as_written(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _only_set(self, dump)


class AnyConfig(vf.TasksetConfig):
    """The agent's config, whatever is in it; the agent's own type checks it in the env server.

    It is written out as it was read, without defaults: those of the agent's type may be others.
    """

    model_config = ConfigDict(extra="allow")
    task: AnyTaskConfig = AnyTaskConfig()

    @model_serializer(mode="wrap")
    def _as_written(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _only_set(self, dump)


class FrozenTask(vf.Task[vf.WireTaskData, vf.State, AnyTaskConfig]):
    """A row. It is never run or scored here."""


class FrozenRows(vf.Taskset[FrozenTask, AnyConfig]):
    def load(self) -> Iterator[FrozenTask]:
        lines = Path(os.environ["ATA_ROWS"]).read_text(encoding="utf-8").split("\n")  # JSON may hold other line ends
        for index, line in enumerate(line for line in lines if line):
            row = {"idx": index, **json.loads(line)}  # older verifiers number no tasks
            yield FrozenTask(vf.WireTaskData.model_validate(row), self.config.task)


def _only_set(config: vf.TasksetConfig | vf.TaskConfig, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
    return {name: value for name, value in dump(config).items() if name in config.model_fields_set}
