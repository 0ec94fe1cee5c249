"""Rows: filling a batch's rows with slices of bundles, and what a batch says of each of its tokens.

A row is S tokens. Concatenate-and-split takes the next S tokens of a tape; a document that does not end in a row goes
on in another, as a segment of its own there. Segment ids count documents within a row from 1; 0 is padding.
"""

import numpy as np

from zaya_jax.data.sources import Bundle

Batch = dict[str, np.ndarray]


class Rows:
    """The rows of a batch while they are filled, left to right."""

    def __init__(self, num_rows: int, seq_len: int, pad_id: int) -> None:
        self.tokens = np.full((num_rows, seq_len), pad_id, np.int32)
        self.targets = np.full((num_rows, seq_len), pad_id, np.int32)
        self.starts = np.zeros((num_rows, seq_len), bool)
        self.learn = np.zeros((num_rows, seq_len), bool)
        self.filled = np.zeros(num_rows, np.int64)

    def room(self, row: int) -> int:
        """Tokens that still fit in the row."""
        return self.tokens.shape[1] - int(self.filled[row])

    def add(self, row: int, bundle: Bundle, start: int, stop: int) -> None:
        """Append tokens start..stop of a bundle; a segment begins where they do."""
        at = int(self.filled[row])
        end = at + stop - start
        self.tokens[row, at:end] = bundle.tokens[start:stop]
        self.targets[row, at:end] = bundle.targets[start:stop]
        self.starts[row, at:end] = bundle.starts[start:stop]
        self.learn[row, at:end] = bundle.learn[start:stop]
        self.starts[row, at] = True
        self.filled[row] = end


def finish(rows: Rows, cross_documents: bool = False) -> Batch:
    """The batch of filled rows; with `cross_documents` a row is one segment, and only padding is cut off."""
    seq_len = rows.tokens.shape[1]
    place = np.arange(seq_len, dtype=np.int32)
    real = place < rows.filled[:, None]
    if cross_documents:
        segment_ids = real.astype(np.int32)
        positions = np.where(real, place, 0)
    else:
        segment_ids = np.cumsum(rows.starts, axis=1, dtype=np.int32)
        positions = place - np.maximum.accumulate(np.where(rows.starts, place, 0), axis=1)
        full = rows.filled == seq_len
        if not full.all():
            segment_ids *= real
            positions *= real
    learn = rows.learn
    targets = np.where(learn, rows.targets, rows.tokens.dtype.type(0))
    return {
        "tokens": rows.tokens,
        "targets": targets,
        "segment_ids": segment_ids,
        "positions": positions.astype(np.int32, copy=False),
        "loss_mask": learn.astype(np.float32),
    }


def efficiency(batch: Batch) -> float:
    """The share of a batch's places that hold real tokens."""
    return float((batch["segment_ids"] > 0).mean())
