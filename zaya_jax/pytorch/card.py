"""The model card of an export, README.md: what the hub reads at its top, and what a person needs to
use the model.

It names nothing by a path of this machine.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from zaya_jax.checkpoint.merged import MergedSource
from zaya_jax.config import files
from zaya_jax.data.mix import parse_mixture
from zaya_jax.model import zaya
from zaya_jax.pytorch import hub, tokenizer_files
from zaya_jax.pytorch.any_model import AnyModel
from zaya_jax.version import __version__

PLACEHOLDER = "PATH"  # where an export has no name on the hub yet
# The parts of an example.
LOAD = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{whole}")
"""
LOAD_QUANTIZED = """from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

# Each expert's matrices are apart in these files, in the model they are one tensor.
experts = get_checkpoint_conversion_mapping("qwen2_moe")
register_checkpoint_conversion_mapping("zaya", experts)
model = AutoModelForCausalLM.from_pretrained(
    "{whole}", quantization_config=CompressedTensorsConfig(dequantize=True)
)
"""
ADAPT = """
from peft import PeftModel

model = PeftModel.from_pretrained(model, "{name}")
"""
TOKENIZE = """tokenizer = AutoTokenizer.from_pretrained("{whole}")
"""
CONTINUE = """inputs = tokenizer("Once upon a time", return_tensors="pt")
"""
CHAT = """chat = [{{"role": "user", "content": "Hello"}}]
inputs = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)
"""
GENERATE = """print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))
"""


@dataclasses.dataclass(frozen=True)
class Publication:
    """What only the owner of a model can say about it."""

    repository: str = PLACEHOLDER  # OWNER/NAME
    license: str | None = None
    languages: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()  # on the hub
    base_model: str | None = None  # OWNER/NAME; by default the one that the run names


UNPUBLISHED = Publication()


def base_of(model: AnyModel, publication: Publication) -> str | None:
    """The hub's model that this one began with; None if it began with none, or with one that has no
    name there."""
    began_with = model.config.run.init_from
    if isinstance(model.source, MergedSource):
        began_with = model.source.base_name
    return publication.base_model or model.imported["hub_name"] or hub.name_of(began_with)


def write(folder: Path, model: AnyModel, publication: Publication, adapters: bool = False) -> None:
    """Writes the card of a directory whose other files are there."""
    base = base_of(model, publication)
    facts = _facts(model, publication, base, adapters)
    title = publication.repository.rpartition("/")[2]
    sections = [
        f"---\n{_metadata(model, publication, base, adapters)}\n---",
        f"# {model.config.name if title == PLACEHOLDER else title}",
        "\n".join(f"- {name}: {fact}" for name, fact in facts.items() if fact is not None),
        "## Use",
        f"```python\n{_example(folder, model, publication, base, adapters)}```",
    ]
    if model.source.workdir:  # weights in memory may have been changed since
        table = ["| evaluated on | metric | value |", "|---|---|---|", *_results(model)]
        if len(table) > 2:
            sections += ["## Results of `experiments.evaluate`", "\n".join(table)]
    files.write(folder / hub.CARD, ("\n\n".join(sections) + "\n").encode())


def _metadata(model: AnyModel, publication: Publication, base: str | None, adapters: bool) -> str:
    from huggingface_hub import ModelCardData

    return ModelCardData(
        license=publication.license,
        library_name="peft" if adapters else "transformers",
        base_model=base,
        datasets=list(publication.datasets) or None,
        language=list(publication.languages) or None,
        pipeline_tag="text-generation",
        tags=["zaya", "mixture-of-experts", *(["lora"] if adapters else [])],
    ).to_yaml()


def _facts(
    model: AnyModel, publication: Publication, base: str | None, adapters: bool
) -> dict[str, str | None]:
    """What a person wants to know; None where it is not known."""
    counts = zaya.param_counts(model.model)
    meta = model.source.meta()
    loss = meta.get("metrics", {}).get("eval/loss")
    config = model.config
    tokenizer = model.tokenizer()
    sources = parse_mixture(config.data.mixture) or [config.data.path]
    facts: dict[str, str | None] = {
        "low-rank updates of" if adapters else "model": (
            f"`zaya`, {counts['total']:,} parameters, {counts['active']:,} of them active for a"
            f" token, context of {model.model.max_position_embeddings:,} tokens"
        ),
        "from": f"`{hub.name_of(model.name) or Path(model.name).name}`, by zaya_jax {__version__}",
        "began with": base and f"`{base}`",
        "license": publication.license or "none is chosen",
        "held-out loss": None if loss is None else f"{loss:.4f} nats a token at this step",
    }
    if meta.get("tokens"):
        facts["data"] = ", ".join(f"`{Path(source).name}`" for source in sources)
        facts["trained"] = f"{meta['step']:,} steps, {meta['tokens']:,} tokens of this run"
    if tokenizer:
        by = "the tokenizer puts it there" if tokenizer.adds_bos else "put it there yourself"
        facts["tokenizer"] = f"{tokenizer.vocab_size:,} ids"
        facts["every text begins with"] = (
            f"`{tokenizer.special_text(tokenizer.bos_id)}`; {by}, or a chat template does"
        )
    return facts


def _example(
    folder: Path, model: AnyModel, publication: Publication, base: str | None, adapters: bool
) -> str:
    text = LOAD
    settings = folder / "config.json"
    if settings.is_file() and files.read_object(settings).get("quantization_config"):
        text = LOAD_QUANTIZED
    if adapters:
        text += ADAPT
    if model.tokenizer_folder:
        has_chats = model.config.data.chats or tokenizer_files.came_with_template(folder)
        text += TOKENIZE + (CHAT if has_chats else CONTINUE) + GENERATE
    name = publication.repository
    return text.format(name=name, whole=(base or "BASE") if adapters else name)


def _results(model: AnyModel) -> Iterator[str]:
    """Rows of what `experiments.evaluate` wrote into the run's folder about this step."""
    for file in [*model.folder.glob("evaluation.json"), *model.folder.glob("*/evaluation.json")]:
        result = files.read_object(file)
        if Path(result.get("model", "")).name == f"{model.folder.name}@{model.step}":
            for name, loss in result["data"].items():
                yield f"| `{Path(name).name}` | loss, nats a token | {_rounded(loss['loss'])} |"
            for task, metrics in result["tasks"].items():
                for metric, (value, error) in metrics.items():
                    yield f"| `{task}` | {metric} | {_rounded(value)} ± {_rounded(error)} |"


def _rounded(value: float | None) -> str:
    return "?" if value is None else f"{value:.4f}"
