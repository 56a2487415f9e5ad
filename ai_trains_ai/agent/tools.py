"""The agent's tools: their schemas, and what each does to the workspace."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ai_trains_ai.errors import WorkspaceError
from ai_trains_ai.interfaces import Sandbox
from ai_trains_ai.records import Limits, SandboxResult
from ai_trains_ai.sandbox.script import changed_files
from ai_trains_ai.workspace import Workspace

SCRIPT_LIMITS = Limits(wall_seconds=10.0, cpu_seconds=8, result_bytes=2 << 20)
SHOWN_CHARACTERS = 4_000


def _schema(name: str, description: str, **properties: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": "string", "description": text} for key, text in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS: tuple[Mapping[str, Any], ...] = (
    _schema("list_files", "List the files of the workspace."),
    _schema("read_file", "Read a file.", path="relative path"),
    _schema("write_file", "Write a file, replacing it.", path="relative path", content="the whole text"),
    _schema(
        "edit_file", "Replace one passage.", path="relative path", old="text that occurs once", new="its replacement"
    ),
    _schema("run_python", "Run a Python file of the workspace in a sandbox without network.", path="relative path"),
    _schema(
        "submit", "Hand in environment.py and job.toml. They are validated; an invalid submission costs an attempt."
    ),
)
REQUIRED = {tool["function"]["name"]: tuple(tool["function"]["parameters"]["required"]) for tool in TOOLS}


def check_arguments(name: str, arguments: Mapping[str, Any]) -> str:
    """Why a call can't be made; empty when it can."""
    if name not in REQUIRED:
        return f"error: no tool {name[:40]!r}; tools: {', '.join(REQUIRED)}"
    missing = [key for key in REQUIRED[name] if key not in arguments]
    if missing:
        return f"error: {name} needs {', '.join(missing)}"
    if any(not isinstance(arguments[key], str) for key in REQUIRED[name]):
        return f"error: arguments of {name} must be strings"
    return ""


def use_file_tool(workspace: Workspace, name: str, arguments: Mapping[str, Any]) -> tuple[Workspace, str]:
    """The workspace after the call, and what the agent reads. Refusals are text, never exceptions."""
    try:
        if name == "list_files":
            return workspace, "\n".join(workspace.list_files())
        if name == "read_file":
            return workspace, workspace.read(arguments["path"])
        if name == "write_file":
            return workspace.write(arguments["path"], arguments["content"]), "ok"
        return workspace.edit(arguments["path"], arguments["old"], arguments["new"]), "ok"
    except WorkspaceError as refusal:
        return workspace, f"error: {refusal}"


async def run_python(workspace: Workspace, path: str, sandbox: Sandbox) -> tuple[Workspace, str]:
    """Run one file of the workspace in the sandbox; what it changed comes back as files of the workspace."""
    if path not in workspace.list_files():
        return workspace, f"error: there is no file {path[:80]!r}"
    result = await sandbox.run(
        "ai_trains_ai.sandbox.script:run",
        json.dumps({"path": path}).encode(),
        files=workspace.files,
        limits=SCRIPT_LIMITS,
    )
    changed, refused = workspace.merge(changed_files(result))
    return changed, "\n".join([_describe(result), *refused])


def _describe(result: SandboxResult) -> str:
    text = result.output.decode("utf-8", "backslashreplace")
    if len(text) > SHOWN_CHARACTERS:
        half = SHOWN_CHARACTERS // 2
        text = f"{text[:half]}\n[… {len(text) - 2 * half} characters …]\n{text[-half:]}"
    end = (
        "exit 0" if result.outcome == "exited" and result.code == 0 else f"{result.outcome} {result.code or ''}".strip()
    )
    return f"{text}\n[{end}]" if text else f"[{end}]"
