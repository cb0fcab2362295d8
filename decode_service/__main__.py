"""`python -m decode_service --model FOLDER --kv-folder FOLDER --kv-secret-file FILE --listen HOST:PORT`: one decode
instance."""

from __future__ import annotations

from serving.lifecycle import end_on_sigterm

end_on_sigterm()  # before imports that take seconds

import sys

from decode_service.service import ROLE, DecodeSettings
from instance.server import run_instance
from serving.settings import settings_options


@settings_options(DecodeSettings)
def main(settings: DecodeSettings) -> None:
    """One decode instance: generates, from KV that a prefill instance computed or from its own.

    Prints one line `ready address=HOST:PORT instance=NAME` when it is ready. SIGTERM drains, a second one stops at
    once. Exit status: 0 stopped; 1 the engine core died, or the machine lacked something for the start (restart it);
    2 it cannot start: settings, model, address; 3 stopped and calls or KV in use were cut off.
    """
    sys.exit(run_instance(settings, ROLE))


if __name__ == "__main__":
    main()
