"""Order between the engine's stream on an accelerator and the threads that load; nothing on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class DeviceOrder:
    """Lets loading threads begin behind the engine's work and end before they report.

    Args:
        device: Where the engine's pages are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_device = device.type != "cpu"

    def mark(self) -> torch.Event | None:
        """What the engine's stream has been given so far; called by the engine's thread."""
        return torch.accelerator.current_stream(self._device).record_event() if self._on_device else None

    @contextmanager
    def behind(self, mark: torch.Event | None) -> Iterator[None]:
        """Work in a stream of this thread's own, behind ``mark``; all of it is done at the end."""
        if mark is None:
            yield
            return
        with torch.accelerator.device_index(self._device.index):
            stream = torch.Stream(self._device)
            stream.wait_event(mark)
            with stream:
                try:
                    yield
                finally:
                    stream.synchronize()

    def finish(self) -> None:
        """Wait for what this thread's stream was given."""
        if self._on_device:
            torch.accelerator.current_stream(self._device).synchronize()
