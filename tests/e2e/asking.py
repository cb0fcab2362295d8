"""A request on a thread of its own, so that a test can act while it is under way."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from tandem import Client, Completion
from tandem.completion import Assembler
from tandem.sampling import generate_request


class Asked:
    """Asks at once. `sampling` and `request_id` are the client's own options."""

    def __init__(self, address: str, prompt: Sequence[int] | str, *, timeout_s: float = 60.0, **options: Any) -> None:
        self.error: BaseException | None = None
        self._completion: Completion | None = None
        self._first = threading.Event()
        self._client = Client(address, timeout_s=timeout_s)
        self._request = generate_request(prompt, options)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait_first_token(self, timeout_s: float = 10.0) -> None:
        assert self._first.wait(timeout_s), f"no first token within {timeout_s:g} s"

    def disconnect(self) -> None:
        """Closes the connection, as a client that goes."""
        self._client.close()

    def join(self) -> None:
        """Waits for the end of the call, good or bad."""
        self._thread.join(30)
        assert not self._thread.is_alive(), "the call did not end"
        self._client.close()

    def completion(self) -> Completion:
        """The answer; raises what the call raised."""
        self.join()
        if self.error is not None:
            raise self.error
        assert self._completion is not None
        return self._completion

    def _run(self) -> None:
        assembler = Assembler()
        try:
            for _ in self._client._pieces(self._request, assembler, None):
                self._first.set()
            self._completion = assembler.finish()
        except BaseException as error:
            self.error = error
