"""A model for each of the short templates in `templates/`, which have the features of families."""

import functools
import json
import re
from pathlib import Path

import tokenizers as library

from zaya_jax.text import tokenizers

# With the features of each family's own template, written for these tests.
FAMILIES = {
    path.stem: path.read_text() for path in sorted((Path(__file__).parent / "templates").iterdir())
}
NAMES = r"<\|\w+\|>|\[/?[A-Z_]+\]|<(?:start|end)_of_turn>|\[gMASK\]|<sop>"
MARKS = sorted(
    {mark for source in FAMILIES.values() for mark in re.findall(NAMES, source)}
    | {"<|system|>", "<|user|>", "<|assistant|>", "<s>", "</s>"}
)


@functools.cache
def _content() -> bytes:
    tok = library.Tokenizer.from_str(tokenizers.Bytes().json())
    tok.add_special_tokens(MARKS)
    return tok.to_str().encode()


def tokenizer_of(source, settings=None, **files):
    """A byte-level tokenizer with all marks, of a model with this template."""
    settings = {"bos_token": "<s>", "eos_token": "</s>"} if settings is None else settings
    files = {"tokenizer_config.json": json.dumps(settings), **files}
    if source:
        files["chat_template.jinja"] = source
    return tokenizers.Tokenizer(
        _content(), {}, "made here", {name: text.encode() for name, text in files.items()}
    )
