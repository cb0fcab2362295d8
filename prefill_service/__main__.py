"""`python -m prefill_service --model FOLDER --kv-folder FOLDER --kv-secret-file FILE --listen HOST:PORT`: one prefill
instance."""

from __future__ import annotations

from serving.lifecycle import end_on_sigterm

end_on_sigterm()  # before imports that take seconds

import sys

from instance.server import run_instance
from prefill_service.service import ROLE, PrefillSettings
from serving.settings import settings_options


@settings_options(PrefillSettings)
def main(settings: PrefillSettings) -> None:
    """One prefill instance: computes prompts and offers their KV to decode instances.

    Prints one line `ready address=HOST:PORT instance=NAME` when it is ready. SIGTERM drains, a second one stops at
    once. Exit status: 0 stopped; 1 the engine core died, or the machine lacked something for the start (restart it);
    2 it cannot start: settings, model, address; 3 stopped and calls or KV in use were cut off.
    """
    sys.exit(run_instance(settings, ROLE))


if __name__ == "__main__":
    main()
