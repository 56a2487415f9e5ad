"""Cut prime-rl's JSON schema down to what a compiled file can touch.

    PYTHONPATH=.:tests python tests/inner/prime_rl/reduce_schema.py VERSION FULL.json

writes ``schema-VERSION.json`` beside this file. The full schema is that of ``RLConfig`` in the version's
``prime-rl-configs`` package (``RLConfig.model_json_schema()``). A table keeps the fields that some corner of the
surface sets, a choice keeps the alternatives that some corner takes; closed tables stay closed, so a name that the
full schema lacks can't become valid here. One thing is opened: the engine checks ``env`` against the classes of the
taskset and the harness that it names, which a schema can't say.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inner.prime_rl.jobs import SITE, corners, job, plan_of, read
from jsonschema import Draft202012Validator

from ai_trains_ai.inner.prime_rl.compile import compile_job
from ai_trains_ai.inner.prime_rl.profiles import profile

DROPPED = ("description", "title", "default", "discriminator", "format", "$defs")


def main(version: str, path: str) -> None:
    schema = json.loads(Path(path).read_text("utf-8"))
    definitions = schema["$defs"]
    definitions["TasksetConfig"]["additionalProperties"] = True
    agent = definitions["TrainSourceConfig"]["properties"]["env"]["default"]["agent"]
    definitions["EnvConfig"]["properties"]["agent"] = _closed(agent)
    files = [compile_job(job(c), profile(version), plan_of(c), SITE) for c in corners()]
    reduced = _reduce(schema, [read(text) for text in set(files)], schema)
    out = Path(__file__).with_name(f"schema-{version}.json")
    out.write_text(json.dumps(reduced, indent=1, sort_keys=True) + "\n", "utf-8")


def _closed(default: Any) -> dict[str, Any]:
    """A table with the names of its default and no others; anything goes where the default has no table."""
    if not isinstance(default, dict):
        return {}
    properties = {name: _closed(value) for name, value in default.items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _reduce(node: dict[str, Any], values: Sequence[Any], root: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in node:
        return _reduce(root["$defs"][node["$ref"].rpartition("/")[2]], values, root)
    small = {name: part for name, part in node.items() if name not in DROPPED}
    for choice in ("anyOf", "oneOf"):
        if choice in node:
            taken = [(option, [v for v in values if _valid(option, v, root)]) for option in node[choice]]
            small[choice] = [_reduce(option, fitting, root) for option, fitting in taken if fitting]
    tables = [value for value in values if isinstance(value, dict)]
    if "properties" in node:
        used = {name: [table[name] for table in tables if name in table] for name in node["properties"]}
        small["properties"] = {
            name: _reduce(node["properties"][name], inner, root) for name, inner in used.items() if inner
        }
    if isinstance(node.get("items"), dict):
        items = [item for value in values if isinstance(value, list) for item in value]
        small["items"] = _reduce(node["items"], items, root)
    return small


def _valid(option: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    return bool(Draft202012Validator({**option, "$defs": root["$defs"]}).is_valid(value))


if __name__ == "__main__":
    main(*sys.argv[1:])
