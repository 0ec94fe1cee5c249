"""Evaluation parity: each request of some lm-eval tasks here, and by lm-eval's own `hf` model on
the exported weights.

    python -m benchmarks.evaluation --torch-python=ORACLE/bin/python [--steps=200] [--work=DIR]

Here lm-eval-harness must be installed (the extra `eval`). ORACLE is a Python 3.11 environment with
torch 2.13.0, transformers 5.23.0 and lm-eval 0.4.13. A small model with a context of 64 tokens is
trained, exported by `experiments.checkpoint to_hf`, and both sides compute in float32. The tasks
are those of tests/evaluate/tasks: choices of one token and of several, empty contexts, contexts
above the model's, generation with stop strings, rolling windows.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TASKS = ROOT / "tests" / "evaluate" / "tasks"
NAMES = ("zaya_choice", "zaya_nothing", "zaya_go_on", "zaya_rolling")

# from_pretrained resets the skip experts' biases, so the model is made first, and lm-eval's class
# gets it as it is.
TORCH = """
import json, sys, torch, lm_eval
from pathlib import Path
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
folder, tasks, names, out = sys.argv[1:]
torch.set_num_threads(2)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
stored = load_file(folder + "/model.safetensors")
with torch.no_grad():
    for name, buffer in model.named_buffers():
        if name in stored:
            buffer.copy_(stored[name])
marks = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
tokenizer = PreTrainedTokenizerFast(tokenizer_file=folder + "/tokenizer.json", **marks)
found = lm_eval.simple_evaluate(
    HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1), tasks=names.split(","),
    task_manager=TaskManager(include_path=tasks), bootstrap_iters=0)
samples = [{"task": t, "doc_id": s["doc_id"], "resps": s["resps"]} for t, own in found["samples"].items() for s in own]
Path(out).write_text(json.dumps({"samples": samples, "results": found["results"]}, default=str))
"""


def trained(folder: Path, steps: int) -> Path:
    """The folder of a small run: a tokenizer of its own, full and sliding layers, the project's own
    pages."""
    import zaya_jax as zj
    from zaya_jax.text import tokenizers

    pages = sorted((ROOT / "docs").glob("*.md"))
    tokenizers.train_bpe([page.read_text(encoding="utf-8") for page in pages], 400).save(
        folder / "tokenizer"
    )
    config = zj.config.default()
    config.name = "evaluated"
    sizes = dict(
        vocab_size=400,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=64,
        num_experts=4,
        router_hidden_size=24,
        max_position_embeddings=64,
        initializer_range=0.05,
        layer_types=("hybrid", "hybrid_sliding", "hybrid"),
        sliding_window=16,
    )
    for key, value in sizes.items():
        config.model[key] = value
    config.precision.compute, config.precision.newton_schulz, config.precision.matmul = (
        "float32",
        "float32",
        "highest",
    )
    config.data.path, config.data.tokenizer = str(ROOT / "docs"), str(folder / "tokenizer")
    config.data.seq_len, config.data.global_batch = 64, 16
    config.run.num_steps, config.eval.every, config.checkpoint.every_steps = steps, steps, steps
    config.log.sample_tokens = 2
    zj.train(config, folder / "run")
    return folder / "run"


def exported(run: Path, out: Path) -> Path:
    """The run's newest weights as transformers reads them."""
    command = [
        sys.executable,
        "-m",
        "experiments.checkpoint",
        "to_hf",
        f"--model={run}",
        f"--out={out}",
    ]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return out


def theirs(python: str, model: Path, work: Path) -> dict[str, Any]:
    """The results of lm-eval's hf model, in another interpreter."""
    out = work / "theirs.json"
    command = [python, "-c", TORCH, str(model), str(TASKS), ",".join(NAMES), str(out)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "hf"), "PYTHONPATH": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | offline, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def ours(model: Path, work: Path) -> dict[str, Any]:
    """The results of experiments.evaluate."""
    out = work / "ours"
    command = [
        sys.executable,
        "-m",
        "experiments.evaluate",
        f"--model={model}",
        f"--tasks={','.join(NAMES)}",
        f"--include_path={TASKS}",
        f"--out={out}",
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "hf")}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | offline, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (out / "samples.jsonl").read_text().splitlines()
    return {
        "samples": [json.loads(line) for line in lines],
        "results": json.loads((out / "evaluation.json").read_text())["tasks"],
    }


def compared(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By task: requests, the greatest distance of log-likelihoods, how many other answers were not
    equal, and which texts there were: a model that says nothing would compare nothing."""
    table: dict[str, dict[str, Any]] = {}
    key = lambda sample: (sample["task"], sample["doc_id"])  # noqa: E731
    answers = {key(sample): sample["resps"] for sample in theirs["samples"]}
    assert sorted(answers) == sorted(key(sample) for sample in ours["samples"])
    for sample in ours["samples"]:
        row = table.setdefault(
            sample["task"], {"requests": 0, "distance": 0.0, "other": 0, "texts": set()}
        )
        for mine, other in zip(sample["resps"], answers[key(sample)], strict=True):
            (a,), (b,) = mine, other
            row["requests"] += 1
            pair = isinstance(a, list)
            row["texts"] |= {b} if isinstance(b, str) and b else set()
            if isinstance(a, str) or pair:
                row["other"] += (a[1] != b[1]) if pair else a != b
            if not isinstance(a, str):
                distance = abs(float(a[0]) - float(b[0])) if pair else abs(float(a) - float(b))
                row["distance"] = max(row["distance"], distance)
    return table


def main() -> None:
    """Both sides, and a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch-python", required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--work", help="a folder for the run and both sides' answers; by default one that goes away"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(args.work or folder)
        work.mkdir(parents=True, exist_ok=True)
        model = exported(trained(work, args.steps), work / "hf_model")
        here, there = ours(model, work), theirs(args.torch_python, model, work)
    print(
        "| task | requests | log-likelihoods differ by at most | other answers that differ |"
        " texts |"
    )
    print("|---|---|---|---|---|")
    for task, row in compared(here, there).items():
        print(
            f"| {task} | {row['requests']} | {row['distance']:.1e} | {row['other']} |"
            f" {len(row['texts'])} |"
        )
    for task, figures in here["results"].items():
        print(task, {name: value for name, (value, _) in figures.items()}, there["results"][task])


if __name__ == "__main__":
    main()
