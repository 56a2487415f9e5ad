"""``python -m ai_trains_ai.cli``."""

from __future__ import annotations

from ai_trains_ai.cli import main

if __name__ == "__main__":
    main()
