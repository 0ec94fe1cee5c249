"""Plans which documents share a row, fills the rows of a batch, and labels each token of it.

Concatenate-and-split takes the next S tokens of a tape; a document that does not end in a row goes
on in another, as a segment of its own there. Best-fit-decreasing keeps documents whole where they
fit into a row, and leaves a little padding. Segment ids count documents within a row from 1; 0 is
padding.
"""

import bisect

import numpy as np

from zaya_jax.text.sources import Bundle

IGNORED = np.int32(-100)  # a target that counts for nothing, also in a loop without `loss_mask`
Batch = dict[str, np.ndarray]
Span = tuple[int, int]  # start, stop on a source's tape of documents
Piece = tuple[Bundle, int, int]  # start, stop within a bundle: a piece of a span


def plan(lengths: np.ndarray, seq_len: int) -> list[list[Span]]:
    """Rows of at most S tokens from documents of these lengths, one after another from 0 on.

    The longest come first, each into the row that it fills best. A document longer than S is cut
    into pieces of S and a rest.
    """
    spans: list[Span] = []
    at = 0
    for size in lengths.tolist():
        spans += [(at + cut, at + min(cut + seq_len, size)) for cut in range(0, size, seq_len)]
        at += size
    rows: list[list[Span]] = []
    rooms: list[tuple[int, int]] = []  # (room, row), sorted
    for span in sorted(spans, key=lambda s: s[0] - s[1]):
        size = span[1] - span[0]
        place = bisect.bisect_left(rooms, (size, 0))
        if place == len(rooms):
            room, row = seq_len, len(rows)
            rows.append([])
        else:
            room, row = rooms.pop(place)
        rows[row].append(span)
        if room > size:
            bisect.insort(rooms, (room - size, row))
    return rows


class Rows:
    """The rows of a batch while they are filled, left to right."""

    def __init__(self, num_rows: int, seq_len: int, pad_id: int) -> None:
        self.tokens = np.full((num_rows, seq_len), pad_id, np.int32)
        self.targets = np.zeros((num_rows, seq_len), np.int32)
        self.starts = np.zeros((num_rows, seq_len), bool)
        self.learn = np.zeros((num_rows, seq_len), bool)
        self.filled = np.zeros(num_rows, np.int64)
        # (row, start, stop) of tokens that could not be read
        self.holes: list[tuple[int, int, int]] = []

    def add(self, row: int, parts: list[Piece]) -> None:
        """Append the parts of one span; a segment begins where they do, and after unreadable
        tokens."""
        begins = True
        for bundle, start, stop in parts:
            at = int(self.filled[row])
            end = at + stop - start
            if bundle.real:
                self.tokens[row, at:end] = bundle.tokens[start:stop]
                self.targets[row, at:end] = bundle.targets[start:stop]
                self.starts[row, at:end] = bundle.starts[start:stop]
                self.learn[row, at:end] = bundle.learn[start:stop]
                self.starts[row, at] |= begins
            else:
                self.holes.append((row, at, end))
            begins = not bundle.real
            self.filled[row] = end


def finish(rows: Rows, cross_documents: bool = False) -> Batch:
    """The batch of filled rows; with `cross_documents` a row is one segment, cut by unreadable
    tokens alone.

    Linear attention hands a segment's state from chunk to chunk: its tokens have to lie together.
    """
    seq_len = rows.tokens.shape[1]
    place = np.arange(seq_len, dtype=np.int32)
    if cross_documents:
        segment_ids = np.ones(rows.tokens.shape, np.int32)
        for row, _, stop in rows.holes:
            segment_ids[row, stop:] += 1
        positions = np.repeat(place[None], len(rows.tokens), axis=0)
    else:
        segment_ids = np.cumsum(rows.starts, axis=1, dtype=np.int32)
        positions = place - np.maximum.accumulate(np.where(rows.starts, place, 0), axis=1)
    if not (rows.filled == seq_len).all() or rows.holes:
        real = place < rows.filled[:, None]
        for row, start, stop in rows.holes:
            real[row, start:stop] = False
        segment_ids *= real
        positions *= real
    return {
        "tokens": rows.tokens,
        "targets": np.where(rows.learn, rows.targets, IGNORED),
        "segment_ids": segment_ids,
        "positions": positions.astype(np.int32, copy=False),
        "loss_mask": rows.learn.astype(np.float32),
    }
