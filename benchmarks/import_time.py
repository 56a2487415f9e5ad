"""Time of ``import ai_trains_ai`` and of composing an experiment, against what they are made of.

Each import runs in fresh interpreters, in turns, and the fastest of them counts: what is measured is the work, not the
machine's other work. The limit of the design for ``import ai_trains_ai`` is 0.2 s.
"""

from __future__ import annotations

import subprocess
import sys

ROUNDS = 15
LIMIT = 0.2
CASES = {
    "nothing": "pass",
    "attrs, cattrs, pluggy": "import attrs, cattrs, cattrs.preconf.json, pluggy",
    "ai_trains_ai": "import ai_trains_ai",
    "ai_trains_ai, every public name": "import ai_trains_ai as a; [getattr(a, n) for n in a.__all__]",
    "ai_trains_ai, an embedded experiment": "import ai_trains_ai as a; a.Experiment.embedded().plugins",
}
TIMED = "import time; t = time.perf_counter(); {code}; print(time.perf_counter() - t)"


def seconds(code: str) -> float:
    """Seconds that ``code`` takes in a fresh interpreter, its start left out."""
    done = subprocess.run([sys.executable, "-c", TIMED.format(code=code)], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    best = dict.fromkeys(CASES, float("inf"))
    for _ in range(ROUNDS):
        for name, code in CASES.items():
            best[name] = min(best[name], seconds(code))
    base = best["attrs, cattrs, pluggy"]
    for name, value in best.items():
        print(f"{name:<40} {1e3 * value:7.1f} ms   {value / base:5.2f} x")
    print(f"limit for ai_trains_ai: {LIMIT:.1f} s, used: {best['ai_trains_ai'] / LIMIT:.1%}")


if __name__ == "__main__":
    main()
