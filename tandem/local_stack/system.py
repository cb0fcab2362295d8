"""The operating system, which has to be Linux for a local stack."""

from __future__ import annotations

import platform

IN_DOCKER = "with Docker, in a checkout: docker build -t tandem:0.1.0 . && docker compose up --wait (docs/compose.md)"
_NAMES = {"Darwin": "macOS"}


def other_system() -> str | None:
    """The name of this operating system; None for Linux."""
    name = platform.system()
    return None if name == "Linux" else _NAMES.get(name, name or "an unknown system")
