"""Writes a new plugin package from the template beside this module."""

from __future__ import annotations

import re
from pathlib import Path

import ai_trains_ai
from ai_trains_ai.errors import ConfigurationError

TEMPLATE = Path(__file__).parent / "template"
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_PREFIX = re.compile(r"(ai-trains-ai|ata)-")


def write_plugin(name: str, folder: Path) -> list[Path]:
    """Write the package ``name`` into ``folder``, which must be empty or absent. Returns the files.

    Raises:
        ConfigurationError: the name can't be that of a distribution and a module, or the folder holds something.
    """
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r} can't be the name of a plugin. Use lower-case letters, digits and single hyphens, "
            "beginning with a letter: ata-thrift."
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"{folder} exists and is not an empty folder. Choose another with --folder.")
    short = _PREFIX.sub("", name)
    words = {
        "NAME": name,
        "MODULE": name.replace("-", "_"),
        "SHORT": short,
        "CLASS": "".join(part.capitalize() for part in short.split("-")),
        "VERSION": ai_trains_ai.__version__,
    }
    written = []
    for source in sorted(TEMPLATE.rglob("*.template")):
        relative = str(source.relative_to(TEMPLATE)).removesuffix(".template").replace("MODULE", words["MODULE"])
        target = folder / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_filled(source.read_text(encoding="utf-8"), words), encoding="utf-8")
        written.append(target)
    return written


def _filled(text: str, words: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: words[found[1]], text)
