"""A command on a terminal of its own: what it shows, as a terminal emulator reads it, and keys typed into it."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence

import pyte

from tests.waiting import wait_until

CTRL_C, CTRL_D, ALT_ENTER, ENTER, UP = "\x03", "\x04", "\x1b\r", "\r", "\x1b[A"


class Terminal:
    """Runs `command` until `end`, or its own end."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, columns: int = 100, lines: int = 40
    ) -> None:
        self._screen = pyte.Screen(columns, lines)
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command],  # so that Ctrl-C becomes SIGINT
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm-256color", **(env or {})},
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        stream = pyte.ByteStream(self._screen)
        while True:
            try:
                received = os.read(self._master, 65536)
            except OSError:  # the command has ended
                return
            if b"\x1b[6n" in received:  # where the cursor is
                os.write(self._master, f"\x1b[{self._screen.cursor.y + 1};{self._screen.cursor.x + 1}R".encode())
            stream.feed(received)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip()

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.text, lambda: f"no {text!r} in:\n{self.text}")

    def wait_for_prompt(self, prompt: str) -> None:
        """Until what it shows ends with `prompt`: a key typed earlier may reach the terminal's own line editing."""
        wait_until(lambda: self.text.endswith("\n" + prompt), lambda: f"no prompt in:\n{self.text}")

    def end(self) -> int:
        """Kills the command if it still runs; returns its exit status."""
        self.process.kill()
        status = self.process.wait()
        self._reader.join(10)
        os.close(self._master)
        return status
