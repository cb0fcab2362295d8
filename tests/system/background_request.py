"""A request on a thread of its own, so that a test can act while it runs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from tandem import Client, Completion

_MORE_S = 30.0
"""A busy machine ends a call later than its deadline."""


class BackgroundRequest:
    """Starts at once. `options` are the client's own: sampling parameters, `request_id`, ... What the
    router fails at is not resumed."""

    def __init__(self, address: str, prompt: Sequence[int] | str, *, timeout_s: float = 60.0, **options: Any) -> None:
        self.error: BaseException | None = None
        self._completion: Completion | None = None
        self._first = threading.Event()
        self._timeout_s = timeout_s
        self._client = Client(address, timeout_s=timeout_s, max_resumptions=0)
        self._stream = self._client.stream(prompt, **options)
        self._thread = threading.Thread(target=self._generate)
        self._thread.start()

    def wait_first_token(self, timeout_s: float = 30.0) -> None:
        assert self._first.wait(timeout_s), f"no first token within {timeout_s:g} s"

    def disconnect(self) -> None:
        """Closes the connection, as a client does that leaves."""
        self._client.close()

    def join(self) -> None:
        """Waits for the end of the call, successful or not."""
        self._thread.join(self._timeout_s + _MORE_S)
        assert not self._thread.is_alive(), "the call did not end"
        self._client.close()

    def completion(self) -> Completion:
        """The completion; raises the error of a call that failed."""
        self.join()
        if self.error is not None:
            raise self.error
        assert self._completion is not None
        return self._completion

    def _generate(self) -> None:
        try:
            while True:
                next(self._stream)
                self._first.set()
        except StopIteration as end:
            self._completion = end.value
        except BaseException as error:
            self.error = error
