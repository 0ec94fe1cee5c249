"""From tokens to batches, the same batches for any number of processes.

    files ──▶ samples ──▶ documents ──▶ tokens ──▶ rows ──▶ batches
    └────────────── zaya_jax.text ────────────┘  └─── here ───────┘

    box        class                            takes → gives
    files      `text_files`, `inputs` of text   `data.path` → names of files
    samples    `inputs.samples` of text         a file → texts, turns of chats
    documents  `token_block.Document` of text   a text or chat → its ids, and which are predicted
    tokens     `stores.MemoryStore`             documents → one tape, in memory
               `prepared_store.PreparedStore`   prepared shards → the tape, read in bundles
    rows       `layout.Concat`, `BestFit`       a row's number → the spans of the tape that it holds
               `order.RowOrder`                 a number in the run → a row's number
               `mix.Mixture`                    a step → the source of each row
    batches    `pipeline.Batches`               a step → arrays [rows of this process, S]
               `pipeline.Stream`                steps in turn → batches, computed ahead by Grain

A run's steps are divided four times: a *phase* of the schedule has *segments* of one batch size
(`schedule`), each of which is a *stretch* here (`mix`); an *era* is consecutive stretches of one
context and packing (`pipeline`).

`stores` opens any path of the config as one of the two stores. `windows` makes the batches of
evaluation from the same rows. `shuffle` has the permutation under `order`.
"""

from typing import Any


def dataset(config: Any, process: tuple[int, int] = (0, 1)) -> Any:
    """The training batches of a config as a `grain.MapDataset`; element t has step t's rows of
    process (index, count).

    Map, slice, prefetch and checkpoint it as any other. An iterator's state is one integer, with
    which any number of processes goes on. There are 2**48 elements, epoch after epoch.
    """
    import grain  # here: it takes a second, and most of this package does without

    from zaya_jax import config as config_lib
    from zaya_jax.config import Config, UserError
    from zaya_jax.data import pipeline
    from zaya_jax.text import tokenizers

    index, count = process
    if not 0 <= index < count:
        raise UserError(
            f"process={process} is (index, count); the index must be at least 0 and below the count"
        )
    checked = config if isinstance(config, Config) else config_lib.check(config)
    tokenizer = tokenizers.load(checked.data.tokenizer)
    return grain.MapDataset.source(pipeline.Batches(checked, tokenizer, process))
