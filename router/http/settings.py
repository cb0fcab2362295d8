"""What the HTTP port is told."""

from __future__ import annotations

from pydantic import field_validator

from serving.settings import Section, host_and_port, setting


class HttpSettings(Section):
    """The port that speaks OpenAI's HTTP API; docs/openai.md says what is served there."""

    listen: str | None = setting(
        None, "host:port of OpenAI's HTTP API, port 0 takes a free one; none: it is not served.", flag="--http-listen"
    )
    max_body_bytes: int = setting(4 << 20, "Longest body of a request in bytes.", ge=1024)
    max_header_bytes: int = setting(16 << 10, "Longest head of a request in bytes.", ge=1024)
    max_connections: int = setting(1024, "Open connections; further ones are closed at once.", ge=1)
    read_timeout_s: float = setting(10.0, "Seconds within which a request's head, and then its body, must come.", gt=0)
    keep_alive_s: int = setting(75, "Seconds that a connection without a request is kept.", ge=0)

    @field_validator("listen")
    @classmethod
    def _is_host_and_port(cls, listen: str | None) -> str | None:
        if listen is not None:
            host_and_port(listen)
        return listen

    @property
    def where(self) -> tuple[str, int] | None:
        """Host and port to listen on; None: nowhere."""
        return None if self.listen is None else host_and_port(self.listen)
