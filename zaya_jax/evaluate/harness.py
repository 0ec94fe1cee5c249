"""lm-eval-harness on a model of ours, in this process: an `LM` with log-likelihoods, rolling ones and generation.

    results = run(model, ["arc_easy"], include_path=None, limit=None, ...)

The same numbers as lm-eval's own `hf` model gives on the exported weights, so the same conventions: no begin of
document before a context unless `add_bos_token` asks for it, an empty context is the begin of document, what is longer
than the model's context loses its left end, and a generation ends before the first of its `until`.
"""

import importlib.util
import itertools
import json
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from zaya_jax import generation
from zaya_jax.config import UserError
from zaya_jax.evaluate.scorer import TOKENS, Row, Scorer
from zaya_jax.library import LanguageModel
from zaya_jax.model.sampling import Sampling

MAX_GEN_TOKS = 256  # of lm-eval's hf model
IGNORED = (
    "do_sample",
    "num_beams",
    "use_cache",
)  # that mean nothing here, or what is meant is known otherwise


def require() -> None:
    """UserError where lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "--tasks needs lm-eval-harness: pip install 'zaya_jax[eval]', or make setup EXTRAS=eval"
        )


def model_of(model: LanguageModel, add_bos_token: bool = False, tokens: int = TOKENS, seed: int = 0) -> Any:
    """An lm-eval `LM` of a model."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    tokenizer = model.tokenizer
    if tokenizer is None:
        raise UserError(f"the model of {model.source} has no tokenizer, which tasks need")

    class ZayaLM(TemplateLM):
        """See the module."""

        max_length = model.config.model.max_position_embeddings
        tokenizer_name = f"{tokenizer.kind}-{tokenizer.sha256[:12]}"
        eot_token_id = tokenizer.eos_id
        prefix_token_id = tokenizer.bos_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            bos = add_bos_token if add_special_tokens is None else add_special_tokens
            return [tokenizer.bos_id] * bos + list(tokenizer.encode(string))

        def _loglikelihood_tokens(self, requests: Sequence, disable_tqdm: bool = False, **_: Any) -> list:
            rows = []
            for _, context, continuation in requests:
                ids = (list(context) + list(continuation))[-(self.max_length + 1) :]
                if len(continuation) >= len(ids):
                    raise UserError(
                        f"a continuation of {len(continuation)} tokens is longer than the model's {self.max_length}"
                    )
                rows.append(Row(ids, len(ids) - len(continuation)))
            with tqdm(total=len(rows), desc="log-likelihoods", disable=disable_tqdm) as bar:
                found = Scorer(model, tokens)(rows, bar.update)
            answers = [
                (float(log_probs.sum(dtype="float64")), bool(likeliest.all()))
                for log_probs, likeliest in found
            ]
            for (texts, *_), answer in zip(requests, answers, strict=True):
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, answer)
            return answers

        def loglikelihood_rolling(self, requests: Sequence, disable_tqdm: bool = False) -> list[float]:
            windows, counts = [], []
            for request in requests:
                ids = self.tok_encode(request.args[0])
                found = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
                own = [(None, *make_disjoint_window(pair)) for pair in found]
                windows += own
                counts.append(len(own))
            answers = iter(self._loglikelihood_tokens(windows, disable_tqdm))
            totals = [sum(answer for answer, _ in itertools.islice(answers, count)) for count in counts]
            for request, total in zip(requests, totals, strict=True):
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            return totals

        def generate_until(self, requests: Sequence, disable_tqdm: bool = False) -> list[str]:
            answers: list[str] = [""] * len(requests)
            groups: dict[str, list[int]] = {}  # only what is asked for alike goes together
            for number, request in enumerate(requests):
                groups.setdefault(repr(request.args[1]), []).append(number)
            with tqdm(total=len(requests), desc="generations", disable=disable_tqdm) as bar:
                for numbers in groups.values():
                    options = normalize_gen_kwargs(requests[numbers[0]].args[1], MAX_GEN_TOKS)
                    for some, texts in self._generations(requests, numbers, dict(options)):
                        for number, text in zip(some, texts, strict=True):
                            answers[number] = text
                            self.cache_hook.add_partial("generate_until", requests[number].args, text)
                        bar.update(len(some))
            return answers

        def _generations(self, requests: Sequence, numbers: list[int], options: dict[str, Any]) -> Any:
            stops = [s for s in handle_stop_sequences(options.pop("until", None), eos=None) if s]
            most = options.pop("max_gen_toks")
            temperature = options.pop("temperature", 0.0) if options.get("do_sample") else 0.0
            names = ("top_k", "top_p", "min_p")
            sampling = Sampling(temperature, **{name: options.pop(name) for name in names if name in options})
            unknown = sorted(set(options) - set(IGNORED))
            if unknown:
                raise UserError(f"a task asks for generation with {', '.join(unknown)}, which is not there")
            room = self.max_length - most
            if room < 1:
                raise UserError(
                    f"a task asks for {most} new tokens, above the model's context of {self.max_length}"
                )
            prompts = {
                n: (self.tok_encode(requests[n].args[0]) or [self.prefix_token_id])[-room:] for n in numbers
            }
            order = sorted(numbers, key=lambda n: -len(prompts[n]))
            while order:
                count = max(tokens // (len(prompts[order[0]]) + most), 1)
                some, order = order[:count], order[count:]
                texts = generation.generate(
                    model.config.model, *model.on_one_device(), tokenizer, [prompts[n] for n in some], most,
                    model.config.precision, stop=stops, sampling=sampling, seeds=[seed + n for n in some],
                )  # fmt: skip
                yield some, [postprocess_generated_text(text, stops, None) for text in texts]

    return ZayaLM()


def run(
    model: LanguageModel, tasks: Sequence[str], *, include_path: str | None = None, limit: int | None = None,
    num_fewshot: int | None = None, add_bos_token: bool = False, tokens: int = TOKENS, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """What lm-eval's simple_evaluate gives, with the samples of each task."""
    require()
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path)
    unknown = [
        task for task in tasks if task not in manager.all_tasks and not task.endswith((".yaml", ".yml"))
    ]
    if unknown:
        raise UserError(
            f"--tasks={','.join(unknown)} is none of lm-eval's {len(manager.all_tasks):,} tasks"
            + (f", nor of {include_path}" if include_path else "")
            + "; `lm-eval ls tasks` lists them, --include_path adds a folder of your own"
        )
    return lm_eval.simple_evaluate(
        model_of(model, add_bos_token, tokens, seed), tasks=list(tasks), limit=limit, num_fewshot=num_fewshot,
        task_manager=manager, random_seed=seed, numpy_random_seed=seed, torch_random_seed=None,
        fewshot_random_seed=1234, bootstrap_iters=1000,
    )  # fmt: skip


def figures(found: dict[str, Any]) -> dict[str, dict[str, tuple[float, float | None]]]:
    """{task: {metric: (value, standard error)}} of what `run` gave."""
    tables: dict[str, dict[str, tuple[float, float | None]]] = {}
    for task, values in found.get("results", {}).items():
        for name, value in values.items():
            metric, _, which = name.partition(",")
            if (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and which
                and "_stderr" not in metric
            ):
                error = values.get(f"{metric}_stderr,{which}")
                label = metric if which == "none" else f"{metric} ({which})"
                tables.setdefault(task, {})[label] = float(value), error if isinstance(error, float) else None
    return tables


def samples(found: dict[str, Any]) -> bytes:
    """Every question with what was asked and answered, a line of JSON each."""
    lines = [
        json.dumps({"task": task, **sample}, default=str)
        for task, own in found.get("samples", {}).items()
        for sample in own
    ]
    return "".join(f"{line}\n" for line in lines).encode()
