"""From tokens to batches, the same batches for any number of processes.

    files ──▶ documents ──▶ tokens ──▶ rows ──▶ batches
    └──────── zaya_jax.text ──────┘  └─── here ───────┘

    box        class                         takes → gives
    files      paths of `data.path`          → names of files (`text.sources`, `text.inputs`)
    documents  `text.tokens.Document`        a file → the ids of each text or chat, which are learnt
    tokens     `stores.Memory`               documents → one tape, in memory
               `storage.Prepared`            shards of a prepared directory → the tape, read in bundles
    rows       `order.Tape`, `order.Packed`  a row's number → the spans of the tape that it holds
               `order.Order`                 a number in the run → a row's number
               `mix.Mixture`                 a step → how many rows of each source
    batches    `pipeline.Batches`            a step → arrays [rows of this process, S] (`pack.finish`)
               `pipeline.Stream`             steps in turn → batches, computed ahead by `workers`

`stores` opens any path of the config as one of the two tapes. `windows` makes the batches of
evaluation from the same rows. `shuffle` has the permutation under `order`.
"""

from typing import Any


def dataset(config: Any, process: tuple[int, int] = (0, 1)) -> Any:
    """The training batches of a config as a `grain.MapDataset`; element t has step t's rows of
    process (index, count).

    Map, slice, prefetch and checkpoint it as any other. An iterator's state is one integer, with
    which any number of processes goes on. There are 2**48 elements, epoch after epoch.
    """
    import grain  # not above: data workers import this package to read, without Grain

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
    return grain.MapDataset.source(
        pipeline.Batches(checked, tokenizers.load(checked.data.tokenizer), process)
    )
