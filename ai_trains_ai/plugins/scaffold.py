"""Writes a new plugin package from the template beside this module."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from pathlib import Path

import ai_trains_ai
from ai_trains_ai.errors import ConfigurationError
from ai_trains_ai.plugins.registry import Registry
from ai_trains_ai.store import attempt_write

TEMPLATE = Path(__file__).parent / "template"
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z][a-z0-9]*)*")
_PREFIX = re.compile(r"^(ai-trains-ai|ata)-")


def write_plugin(name: str, folder: Path) -> list[Path]:
    """Write the package ``name`` into ``folder``, which must be empty or absent. Returns the files.

    Raises:
        ConfigurationError: the name can't be that of a distribution and a module, or is taken; or the folder holds
            something.
        StorageError: the folder can't be written to.
    """
    module, short = name.replace("-", "_"), _PREFIX.sub("", name)
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r} can't be the name of a plugin. Use lower-case letters, digits and single hyphens, "
            "each part beginning with a letter: ata-thrift."
        )
    if keyword.iskeyword(module) or module in sys.stdlib_module_names or _exists(module):
        raise ConfigurationError(f"The plugin's module would be {module!r}, which is taken. Choose another name.")
    taken = {name for kind in ("reward", "gpu_provider") for name in Registry().entries(kind)}
    if short in taken:
        raise ConfigurationError(f"The plugin's parts would be called {short!r}, which is taken. Choose another name.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"{folder} exists and is not an empty folder. Choose another with --folder.")
    words = {
        "NAME": name,
        "MODULE": module,
        "SHORT": short,
        "CLASS": "".join(part.capitalize() for part in short.split("-")),
        "VERSION": ai_trains_ai.__version__,
    }
    written = []
    for source in sorted(TEMPLATE.rglob("*.template")):
        relative = str(source.relative_to(TEMPLATE)).removesuffix(".template").replace("MODULE", words["MODULE"])
        target = folder / relative
        attempt_write(target, _filled(source.read_text(encoding="utf-8"), words).encode())
        written.append(target)
    return written


def _filled(text: str, words: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: words[found[1]], text)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
