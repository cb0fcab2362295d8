"""`python -m vllm_engine.process ADDRESS`: the process that holds vLLM, in the place of `engine.core.process`.

    instance server ─stdin, ZeroMQ─▶ this process ─▶ vLLM's EngineCore ─▶ vLLM's workers

Each process ends with the one to its left, however that ends. This one watches its standard input. vLLM starts its
processes with `spawn`, which imports this module in each of them first, as `__mp_main__`: there it requests SIGKILL at
the parent's death. vLLM's shared memory is removed by Python's resource tracker, which is kept out of the process
group, so that a signal to the group leaves it alive to do that.
"""

from __future__ import annotations

import asyncio
import os
import sys
from multiprocessing import resource_tracker

from serving.lifecycle import die_with_parent

if __name__ == "__mp_main__":
    die_with_parent(os.getppid())


def main() -> None:
    """Run until `Shutdown`, the parent's death or vLLM's."""
    from engine.errors import EngineError, start_problem, start_status
    from vllm_engine.supported import INSTALL_VLLM, require_vllm

    try:
        from engine.core.process import begin

        config, address = begin()
        require_vllm()
        _start_resource_tracker()
        from vllm_engine.host import serve  # imports vLLM, for seconds

        asyncio.run(serve(config, address))
    except (EngineError, ImportError, OSError) as error:
        print(f"engine core: {start_problem(error, INSTALL_VLLM)}", file=sys.stderr, flush=True)  # noqa: T201  # the instance's log
        os._exit(start_status(error))  # without waiting for vLLM's threads
    os._exit(0)


def _start_resource_tracker() -> None:
    group = os.getpgid(0)
    os.setpgid(0, 0)
    resource_tracker.ensure_running()
    os.setpgid(0, group)


if __name__ == "__main__":
    main()
