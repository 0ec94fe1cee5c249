"""The model card of an export, README.md: what the hub reads at its top, and what a person needs to
use the model.

It names nothing by a path of this machine.
"""

from pathlib import Path

from zaya_jax.checkpoint.merged import MergedSource
from zaya_jax.config import files
from zaya_jax.data.mix import parse_mixture
from zaya_jax.model import zaya
from zaya_jax.pytorch import any_model, hf, tokenizer_files
from zaya_jax.pytorch.any_model import AnyModel
from zaya_jax.version import __version__

CARD = "README.md"
PLACEHOLDER = "PATH"  # of the export, which has no name on the hub yet
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


def base_of(model: AnyModel) -> str | None:
    """The hub's model that this one began with; None if it began with none, or with one that has no
    name there."""
    began_with = model.config.run.init_from
    if isinstance(model.source, MergedSource):
        began_with = model.source.base_name
    return model.imported["hub_name"] or any_model.name_on_hub(began_with)


def write(folder: Path, model: AnyModel, adapters: bool = False) -> None:
    """Writes the card of a directory whose other files are there."""
    base = base_of(model)
    facts = [
        f"- {name}: {fact}"
        for name, fact in _facts(model, base, adapters).items()
        if fact is not None
    ]
    sections = [
        f"---\n{_metadata(base, adapters)}\n---",
        f"# {model.config.name}",
        "\n".join(facts),
        "## Use",
        f"```python\n{_example(folder, model, base, adapters)}```",
    ]
    files.write(folder / CARD, ("\n\n".join(sections) + "\n").encode())


def _metadata(base: str | None, adapters: bool) -> str:
    """What the hub reads, as YAML."""
    lines = [f"library_name: {'peft' if adapters else 'transformers'}"]
    if base:
        lines.append(f"base_model: {base}")
    lines += ["pipeline_tag: text-generation", "tags:", "- zaya", "- mixture-of-experts"]
    if adapters:
        lines.append("- lora")
    return "\n".join(lines)


def _facts(model: AnyModel, base: str | None, adapters: bool) -> dict[str, str | None]:
    """What a person wants to know; None where it is not known."""
    config, tokenizer = model.config, model.tokenizer()
    counts, meta = zaya.param_counts(model.model), model.source.meta()
    loss = meta.get("metrics", {}).get("eval/loss")
    facts: dict[str, str | None] = {
        "low-rank updates of" if adapters else "model": (
            f"`zaya`, {counts['total']:,} parameters, {counts['active']:,} of them active for a"
            f" token, context of {model.model.max_position_embeddings:,} tokens"
        ),
        "from": (
            f"`{any_model.name_on_hub(model.name) or Path(model.name).name}`, by zaya_jax"
            f" {__version__}"
        ),
        "began with": base and f"`{base}`",
        "held-out loss": None if loss is None else f"{loss:.4f} nats a token at this step",
    }
    if meta.get("tokens"):
        sources = parse_mixture(config.data.mixture) or [config.data.path]
        facts["data"] = ", ".join(f"`{Path(source).name}`" for source in sources)
        facts["trained"] = f"{meta['step']:,} steps, {meta['tokens']:,} tokens of this run"
    if tokenizer:
        by = "the tokenizer puts it there" if tokenizer.adds_bos else "put it there yourself"
        facts["tokenizer"] = f"{tokenizer.vocab_size:,} ids"
        facts["every text begins with"] = (
            f"`{tokenizer.special_text(tokenizer.bos_id)}`; {by}, or a chat template does"
        )
    return facts


def _example(folder: Path, model: AnyModel, base: str | None, adapters: bool) -> str:
    config = folder / "config.json"
    quantized = config.is_file() and hf.read_json(config).get("quantization_config")
    text = LOAD_QUANTIZED if quantized else LOAD
    if adapters:
        text += ADAPT
    if model.tokenizer_folder:
        has_chats = model.config.data.chats or tokenizer_files.came_with_template(folder)
        text += TOKENIZE + (CHAT if has_chats else CONTINUE) + GENERATE
    return text.format(name=PLACEHOLDER, whole=(base or "BASE") if adapters else PLACEHOLDER)
