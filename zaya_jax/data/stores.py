"""Where a run's documents lie: what a path of its config names, opened once a program, to learn and held out."""

import hashlib

from zaya_jax.config import Config, UserError
from zaya_jax.data import chats, order, sources, storage
from zaya_jax.data.tokenizers import Tokenizer

TokenStore = order.Memory | storage.Prepared

# By path, tokenizer, and the context that chats are fitted to (0: text).
_text_stores: dict[tuple[str, str, int], tuple[order.Memory, order.Memory]] = {}


def open_stores(config: Config, path: str, tokenizer: Tokenizer) -> tuple[TokenStore, TokenStore]:
    """(training, held-out) stores of a path; a text corpus is tokenised once a program, and so are chats."""
    data = config.data
    if data.chats:
        chats.require_marks(tokenizer, data.tokenizer)
    if path != "stdlib" and storage.is_prepared(path):
        shards = storage.Prepared(path, "train", config.data.on_corrupt)
        own = f"config.data.tokenizer={config.data.tokenizer!r}"
        way_out = f"set that to {storage.join(path, 'tokenizer')}"
        shards.require_tokenizer(tokenizer.sha256, path, own, way_out)
        if not shards.num_tokens:
            raise UserError(f"{path} holds no training tokens; prepare it with more input")
        if data.chats:
            chats.require_prepared(path, shards, data.seq_len)
        return shards, storage.Prepared(path, "held_out", config.data.on_corrupt)
    key = (path, tokenizer.sha256, data.seq_len if data.chats else 0)
    if key not in _text_stores:
        said = ""
        try:
            if data.chats:
                found = chats.read(path, tokenizer, data.seq_len)
                sides, said = (found.train, found.held_out), found.said
            else:
                sides = sources.text_corpus(path, tokenizer)
        except UserError as error:
            named = "config.data.path" if path == config.data.path else "a mixture's source"
            raise UserError(str(error).replace("config.data.path", named)) from None
        train, held_out = (order.Memory(path, side, _content(side, data.chats), said) for side in sides)
        _text_stores[key] = train, held_out
    return _text_stores[key]


def _content(side: sources.Bundle, masked: bool) -> str:
    """Of what is in memory: its tokens, and what of them is learnt where that is not all."""
    held = hashlib.sha256(side.tokens)
    if masked:
        held.update(side.learn)
    return held.hexdigest()
