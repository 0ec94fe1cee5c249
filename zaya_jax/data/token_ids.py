"""The ids that a model's config gives to begin, end and padding are the tokenizer's.

The model never learns the embedding row of its padding id (`zaya.Embedding`), so an id of a token that does occur must
not stand there: with the begin of documents as padding, its row would stay what it was at the start.
"""

import dataclasses
from typing import Any

from zaya_jax.config import Config, UserError
from zaya_jax.data.tokenizers import Tokenizer

NAMES = {"bos_token_id": "bos_id", "eos_token_id": "eos_id", "pad_token_id": "pad_id"}


def agree(config: Config, tokenizer: Tokenizer) -> Config:
    """The config with the ids that it leaves open (None) as the tokenizer has them; UserError where it has others.

    Where the tokenizer pads with a token that stands for something else too (the end of documents or of a turn, a
    character), the model has no padding id: it would never learn that row.
    """
    ids: dict[str, Any] = {ours: getattr(tokenizer, theirs) for ours, theirs in NAMES.items()}
    if not tokenizer.pads_alone:
        ids["pad_token_id"] = None
    for key, has in ids.items():
        given = getattr(config.model, key)
        if given not in (None, has):
            own = f"has {has}; give that, or" if has is not None else "has no token of its own for it;"
            raise UserError(
                f"config.model.{key}={given}, but tokenizer {config.data.tokenizer} {own} leave the key at its default "
                "None, which takes the tokenizer's"
            )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **ids))
