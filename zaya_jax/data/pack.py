"""Plans which documents share a row, fills the rows of a batch, and labels each token of it.

Concatenate-and-split takes the next S tokens of a tape; a document that does not end in a row
continues in another, as a segment of its own there. Best-fit-decreasing keeps documents whole where
they fit into a row, and leaves a little padding. Segment ids count documents within a row from 1; 0
is padding.
"""

import bisect

import numpy as np

from zaya_jax.text.token_block import TokenBlock

IGNORED = np.int32(-100)  # the target of tokens without one, for loops that do not use `loss_mask`
Batch = dict[str, np.ndarray]
Span = tuple[int, int]  # start, stop on a source's tape of documents


def pack_documents(lengths: np.ndarray, seq_len: int) -> list[list[Span]]:
    """Rows of at most S tokens from documents of these lengths, one after another from 0 on.

    The longest come first, each into the row that it fills best. A document longer than S is cut
    into pieces of S and a rest.
    """
    spans: list[Span] = []
    begin = 0
    for size in lengths.tolist():
        end = begin + size
        spans += [(cut, min(cut + seq_len, end)) for cut in range(begin, end, seq_len)]
        begin = end
    rows: list[list[Span]] = []
    open_rows: list[tuple[int, int]] = []  # (room left, row), sorted
    for span in sorted(spans, key=lambda span: span[0] - span[1]):
        size = span[1] - span[0]
        index = bisect.bisect_left(open_rows, (size, 0))
        if index == len(open_rows):
            room, row = seq_len, len(rows)
            rows.append([])
        else:
            room, row = open_rows.pop(index)
        rows[row].append(span)
        if room > size:
            bisect.insort(open_rows, (room - size, row))
    return rows


class BatchBuilder:
    """The rows of a batch, filled from left to right."""

    def __init__(self, num_rows: int, seq_len: int, pad_id: int) -> None:
        self._seq_len = seq_len
        self._tokens = np.full((num_rows, seq_len), pad_id, np.int32)
        self._targets = np.full((num_rows, seq_len), IGNORED, np.int32)
        self._starts = np.zeros((num_rows, seq_len), bool)
        self._real = np.zeros((num_rows, seq_len), bool)  # a token was read
        self._pad_id = pad_id
        self._filled = [0] * num_rows

    def append_span(self, row: int, block: TokenBlock) -> None:
        """Add one span to a row; a segment begins there, and after unreadable tokens."""
        begin = self._filled[row]
        end = self._filled[row] = begin + len(block)
        self._tokens[row, begin:end] = np.where(block.real, block.tokens, self._pad_id)
        self._targets[row, begin:end] = np.where(block.learn, block.targets, IGNORED)
        self._real[row, begin:end] = block.real
        self._starts[row, begin:end] = block.starts | _run_begins(block.real)

    def build(self, cross_documents: bool = False) -> Batch:
        """The batch; with `cross_documents` a row is one segment, cut only by unreadable tokens.

        Linear attention hands a segment's state from chunk to chunk, so one segment must be
        contiguous: none may go on behind unreadable tokens. Positions do, in such a row.
        """
        columns = np.arange(self._seq_len, dtype=np.int32)
        if cross_documents:
            starts = _run_begins(self._real)
            positions = np.broadcast_to(columns, starts.shape)
        else:
            starts = self._starts
            positions = columns - np.maximum.accumulate(np.where(starts, columns, 0), axis=1)
        return {
            "tokens": self._tokens,
            "targets": self._targets,
            "segment_ids": np.cumsum(starts, axis=1, dtype=np.int32) * self._real,
            "positions": (positions * self._real).astype(np.int32, copy=False),
            "loss_mask": (self._targets != IGNORED).astype(np.float32),
        }


def _run_begins(flags: np.ndarray) -> np.ndarray:
    """Where a run of true flags begins, along the last axis."""
    begins = flags.copy()
    begins[..., 1:] &= ~flags[..., :-1]
    return begins
