"""What the engine core's silence means for this instance's health.

The core gives a sign every 250 ms, but none during a step. So a silence of seconds, and of several times what the step
should take, is a core that gets no work done now (not ready: no new requests), and one of half a minute is a core that
hangs (not alive: the supervisor restarts us). The core's death is another matter: the front sees it at once and ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from serving.health import LIVENESS, Health

_log = logging.getLogger(__name__)
_POLL_S = 0.25
_STEPS_OF_SILENCE = 5


async def watch_core(
    health: Health,
    service_names: list[str],
    silence_s: Callable[[], float],
    *,
    predicted_step_s: Callable[[], float],
    unready_s: float,
    dead_s: float,
) -> None:
    """Keeps `health` true to the core's silence until cancelled."""
    ready = alive = True
    while True:
        await asyncio.sleep(_POLL_S)
        silent_s, long_step_s = silence_s(), _STEPS_OF_SILENCE * predicted_step_s()
        if (silent_s < max(unready_s, long_step_s)) != ready:
            ready = not ready
            _log.warning("engine core %s", "speaks again" if ready else f"silent for {silent_s:.1f} s: not ready")
            for name in service_names:
                await health.set_serving(name, ready)
        if (silent_s < max(dead_s, long_step_s)) != alive:
            alive = not alive
            await health.set_serving(LIVENESS, alive)
