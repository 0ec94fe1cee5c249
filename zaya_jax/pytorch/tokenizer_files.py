"""Writes a workdir's tokenizer for transformers, with the chat template that the model learnt.

A model keeps the chat template it came with, which fine-tuning also uses; otherwise it gets ours, if
its vocabulary has the turn tokens. A model that was imported and not trained is exported unchanged.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zaya_jax.config import Config
from zaya_jax.text import chat_template, tokenizers
from zaya_jax.text.tokenizers import CONFIG_FILE as CONFIG
from zaya_jax.text.tokenizers import TEMPLATE_FILE as TEMPLATE

FILES = (tokenizers.FILE, *tokenizers.EXTRA_FILES, "vocab.json", "merges.txt")


def read_files(folder: Path) -> dict[str, bytes]:
    """The contents of a folder's files that belong to a tokenizer."""
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}


def write(
    target: Path,
    originals: Mapping[str, bytes],
    tokenizer: tokenizers.Tokenizer | None,
    config: Config | None,
) -> None:
    """A tokenizer's files in a model directory; unchanged if the model was not trained (no
    config)."""
    for name, content in originals.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes(content)
    if config is None or tokenizer is None:
        return
    if isinstance(tokenizer, tokenizers.Bytes):
        (target / "tokenizer.json").write_text(tokenizer.json(), encoding="utf-8")
    settings = _read_config(target)
    if chat_template.has_turn_tokens(tokenizer) and not came_with_template(target):
        (target / TEMPLATE).write_text(chat_template.make_template(tokenizer), encoding="utf-8")
        settings.pop("chat_template", None)  # a reader of both may take either
    if not (target / CONFIG).is_file():
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.model.max_position_embeddings,
        }
        names = {
            "bos_token": tokenizer.bos_id,
            "eos_token": tokenizer.eos_id,
            "pad_token": tokenizer.pad_id,
        }
        settings |= {name: tokenizer.special_text(token) for name, token in names.items()}
    if (target / "tokenizer.json").is_file() and settings != _read_config(target):
        text = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
        (target / CONFIG).write_text(text, encoding="utf-8")


def came_with_template(folder: Path) -> bool:
    """Whether a tokenizer's folder has a template that is not ours."""
    return bool(chat_template.model_templates(read_files(folder)))


def _read_config(folder: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json; empty if it is missing or unreadable."""
    file = folder / CONFIG
    return tokenizers.read_tokenizer_config({CONFIG: file.read_bytes()} if file.is_file() else {})
