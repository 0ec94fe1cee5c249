"""Writes the continuation of the config's prompt that a run ends with, for its report.

Process 0 makes it alone, with the weights of the checkpoint that has just been saved: no other device gives up memory
for it. There is no sample where the weights are larger than the free memory of that device.
"""

import json
from pathlib import Path

import jax

from zaya_jax import generation
from zaya_jax.checkpoint import partial
from zaya_jax.checkpoint.source import Source
from zaya_jax.config import Config
from zaya_jax.data.tokenizers import Tokenizer
from zaya_jax.model import decode, zaya
from zaya_jax.model.sampling import Sampling
from zaya_jax.training import start
from zaya_jax.training.logs import say

# In bytes a parameter: float32, and the copy in the products' format that XLA may keep through the decoding.
BYTES = 6


def write_sample(workdir: Path, config: Config, tokenizer: Tokenizer, step: int, source: Source) -> None:
    """Writes sample.txt and adds it to samples.jsonl, or says why not. `config` is that of the step's phase.

    In process 0 alone, when the training's state is gone from its device; `source` has the weights of the step.
    """
    path = workdir / "sample.txt"
    path.unlink(missing_ok=True)
    device, model = jax.local_devices()[0], config.model
    needed, free = BYTES * zaya.param_counts(model)["total"], free_bytes(device)
    if needed > free:
        say(
            f"no sample: with these weights it needs {needed / 2**30:.1f} GiB on one device, {free / 2**30:.1f} are "
            f"free; python -m experiments.generate --model={workdir} makes one where there is room"
        )
        return
    with jax.default_device(device), jax.default_matmul_precision(config.precision.matmul):
        weights = [partial.read(source, name) for name in ("params.*", "balance.bias")]
        params, bias = jax.device_put((weights[0]["params"], weights[1]["balance"]["bias"]), device)
        del weights
        prompt = config.log.sample_prompt
        ids, ends = [tokenizer.bos_id, *tokenizer.encode(prompt)], list[int]()
        if config.data.chats:  # a user asks it
            talk = generation.Conversation(tokenizer)
            ids, ends = talk.ask(prompt), [tokenizer.eos_id, *talk.ends]
        room = model.max_position_embeddings - len(ids)
        if room < config.log.sample_tokens:
            say(f"the sample has {max(room, 0)} tokens, as many as the model's max_position_embeddings leaves")
        decoder = decode.Decoder(model, params, bias, config.precision, kernels=config.kernels)
        (new,) = decode.generate(
            decoder, [ids], min(config.log.sample_tokens, room),
            sampling=Sampling(config.log.sample_temperature), seeds=config.run.seed, ends=ends,
        ) if room > 0 else [[]]  # fmt: skip
    if config.data.chats:
        text = f"{prompt}\n{tokenizer.decode(new)}"
    else:
        goes_on = generation.Text(tokenizer, before=ids)
        text = prompt + goes_on.add(new) + goes_on.rest()
    path.write_text(text, encoding="utf-8")
    with (workdir / "samples.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "prompt": prompt, "text": text}) + "\n")


def free_bytes(device: jax.Device) -> int:
    """The free memory of a device; of a CPU half of the machine's."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return start.machine_bytes() // 2
