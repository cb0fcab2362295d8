"""Channels of tests to servers in the same process, which a busy machine may stop for seconds."""

from __future__ import annotations

from serving.channel import ChannelSettings

PATIENT = ChannelSettings(ping_timeout_ms=20_000)
"""By default a channel gives a peer up that does not answer a ping for a second."""
