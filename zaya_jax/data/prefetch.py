"""Sends batches to the device before the step asks for them, and measures how long the step still had to wait.

A thread takes batches from the stream and starts their transfer; the step takes finished ones. The reported state is
that of the last batch given out, not of the last one fetched, so a checkpoint never skips batches in the queue.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from zaya_jax.data import pack
from zaya_jax.data.pack import Batch
from zaya_jax.data.pipeline import Stream

_END = object()


class DevicePrefetch(Iterator[Any]):
    """A stream whose batches `put` has sent to the device, `depth` of them ahead of the step.

    `put` is, say, `lambda batch: jax.device_put(batch, shardings)`, or with several processes
    `lambda b: jax.tree.map(jax.make_array_from_process_local_data, shardings, b)`.
    """

    def __init__(self, stream: Stream, put: Callable[[Batch], Any], depth: int = 2) -> None:
        self._stream, self._put, self._depth = stream, put, depth
        self._state = stream.get_state()
        self._waited, self._since, self._efficiency = 0.0, time.perf_counter(), list[float]()
        self._thread: threading.Thread | None = None

    def __next__(self) -> Any:
        if self._thread is None:
            self._begin()
        began = time.perf_counter()
        batch, state, efficiency = self._queue.get()
        self._waited += time.perf_counter() - began
        if batch is _END:
            self._thread = None
            raise state
        self._state = state
        self._efficiency.append(efficiency)
        return batch

    def get_state(self) -> dict[str, Any]:
        """The stream's state after the last batch given out."""
        return self._state

    def set_state(self, state: dict[str, Any]) -> str:
        """Go on where the state was taken; the stream's note on it."""
        self.close()
        note = self._stream.set_state(state)
        self._state = self._stream.get_state()
        return note

    def leave_out(self, ranges: Sequence[Sequence[int]]) -> None:
        """Go on without these batches: see `Stream.leave_out`."""
        self.close()
        self._stream.leave_out(ranges)
        self._state = self._stream.get_state()

    def metrics(self) -> dict[str, float]:
        """The stream's metrics, with the share of time since the last call that the step waited here, and the share
        of places that had a token in the batches that it was given.
        """
        now = time.perf_counter()
        out = self._stream.metrics() | {"data/wait_fraction": self._waited / max(now - self._since, 1e-9)}
        if self._efficiency:
            out["data/efficiency"] = sum(self._efficiency) / len(self._efficiency)
        self._waited, self._since, self._efficiency = 0.0, now, []
        return out

    def close(self) -> None:
        """Stop fetching; the next batch starts it again after the last one given out."""
        if self._thread is not None:
            self._stopping.set()
            while self._thread.is_alive():
                try:
                    self._queue.get(timeout=0.05)
                except queue.Empty:
                    continue
            self._thread = None
            self._stream.set_state(self._state)
        self._stream.close()

    def _begin(self) -> None:
        self._queue: queue.Queue[tuple[Any, Any, float]] = queue.Queue(self._depth)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._fetch, name="device-prefetch", daemon=True)
        self._thread.start()

    def _fetch(self) -> None:
        while not self._stopping.is_set():
            try:
                batch = next(self._stream)
                item: tuple[Any, Any, float] = (self._put(batch), self._stream.get_state(), pack.efficiency(batch))
            except Exception as error:  # handed to the step, which raises it
                item = _END, error, 0.0
            self._queue.put(item)
            if item[0] is _END:
                return
