"""Data: from text to the batches of a training run, the same batches for any number of processes.

Preparing: `inputs` finds samples in files, `chat` reads conversations, `chat_template` spells them
and fits them to a context, `tokenizers` turns text into ids, `prepare` and `prepare_task` write
token shards in the format of `tokens`, on one machine or many.

Reading: `storage` fetches bundles of shards, `sources` and `chats` read files that need no
preparing, and `stores` opens any of these. `order` and `pack` say which tokens a row holds, `mix`
which source it comes from. `pipeline` makes the stream of training batches, with `workers` to
compute them ahead; `windows` makes the batches of evaluation.
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
    from zaya_jax.data import pipeline, tokenizers

    index, count = process
    if not 0 <= index < count:
        raise UserError(
            f"process={process} is (index, count); the index must be at least 0 and below the count"
        )
    checked = config if isinstance(config, Config) else config_lib.check(config)
    return grain.MapDataset.source(
        pipeline.Batches(checked, tokenizers.load(checked.data.tokenizer), process)
    )
