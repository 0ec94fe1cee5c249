"""Runs lm-eval-harness on our models, in this process: an `LM` with (rolling) log-likelihoods and
generation.

    results = run(model, ["arc_easy"], include_path=None, limit=None, ...)

The numbers equal those of lm-eval's own `hf` model on the exported weights, so the conventions are
the same: a begin of document before a text where the tokenizer adds one itself or `add_bos_token`
asks for it, an empty context is the begin of document, a text longer than the model's context loses
its left end, and a generation ends before the first of its `until`. Several processes all run the
same tasks; scoring and generation share out their batches.
"""

import dataclasses
import importlib.util
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from zaya_jax import generation
from zaya_jax.cluster import multihost
from zaya_jax.config import UserError, fields, first_line, shown
from zaya_jax.evaluate.scorer import TOKENS, ScoredModel, Scorer, TokenRow
from zaya_jax.model.sampling import Sampling
from zaya_jax.progress import Progress
from zaya_jax.text import chat, chat_template
from zaya_jax.text.tokenizers import Tokenizer

# Defaults of lm-eval's hf model and command line.
MAX_GEN_TOKS = 256
FEWSHOT_SEED = 1234
BOOTSTRAPS = 1000
# further options of a generation, and the values that change nothing here
WITHOUT_EFFECT = {"do_sample": (True, False), "num_beams": (1,), "use_cache": (True, False)}


def require(option: str = "--tasks") -> None:
    """UserError if lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            f"{option} needs lm-eval-harness: pip install lm-eval, or make setup EXTRAS=eval"
        )


@dataclasses.dataclass(frozen=True)
class GenerationOptions:
    """A task's options for a generation."""

    stops: list[str]
    num_tokens: int
    sampling: Sampling


def parse_generation_options(generation_kwargs: dict[str, Any]) -> GenerationOptions:
    """The options of a request; UserError for one that is not supported."""
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

    options: dict[str, Any] = dict(normalize_gen_kwargs(generation_kwargs, MAX_GEN_TOKS))
    stops = [stop for stop in handle_stop_sequences(options.pop("until", None), eos=None) if stop]
    num_tokens = options.pop("max_gen_toks")
    temperature = options.pop("temperature", 0.0)
    names = ("top_k", "top_p", "min_p")
    limits = {name: options.pop(name) for name in names if options.get(name) is not None}
    for name, value in options.items():
        if value is not None and value not in WITHOUT_EFFECT.get(name, ()):
            raise UserError(
                f"a task asks for generation with {name}={shown(value)}, which is not supported"
            )
    if not options["do_sample"]:
        return GenerationOptions(stops, num_tokens, Sampling())
    if not temperature:
        raise UserError(
            "a task asks for samples without a temperature; give it one, or do_sample: false"
        )
    return GenerationOptions(stops, num_tokens, Sampling(temperature, **limits))


def make_lm(
    model: ScoredModel,
    add_bos_token: bool | None = None,
    tokens: int = TOKENS,
    seed: int = 0,
    in_chat: bool = False,
) -> Any:
    """An lm-eval `LM` of a model; `in_chat`: texts come from its chat template, whose special
    tokens are read as such."""
    from lm_eval.api.model import TemplateLM

    if model.tokenizer is None:
        raise UserError(f"the model of {model.source} has no tokenizer, which tasks need")
    facts = {  # class attributes, because TemplateLM has properties of these names
        "max_length": model.config.model.max_position_embeddings,
        "tokenizer_name": f"{model.tokenizer.kind}-{model.tokenizer.sha256[:12]}",
        "eot_token_id": model.tokenizer.eos_id,
        "prefix_token_id": model.tokenizer.bos_id,
    }
    zaya_lm = type("ZayaLM", (_Answers, TemplateLM), facts)
    return zaya_lm(model, model.tokenizer, add_bos_token, tokens, seed, in_chat)


class _Answers:
    """The part of an `LM` that lm-eval's TemplateLM leaves to a model; lm-eval is imported only to
    run tasks."""

    max_length: int
    eot_token_id: int
    prefix_token_id: int

    def __init__(
        self,
        model: ScoredModel,
        tokenizer: Tokenizer,
        add_bos: bool | None,
        tokens: int,
        seed: int,
        in_chat: bool,
    ):
        super().__init__()
        self._model = model
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._seed = seed
        self._add_bos = tokenizer.adds_bos if add_bos is None else add_bos
        if in_chat:
            chat_template.require_turn_tokens(tokenizer, f"the tokenizer of {model.source}")
        self._template = chat_template.Template(tokenizer) if in_chat else None

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Ids, by default with a begin of document where the tokenizer adds one or `add_bos_token`
        asks for it."""
        if self._template:
            ids = self._tokenizer.encode_with_specials(string)[0]
        else:
            ids = list(self._tokenizer.encode(string))
        bos = self._add_bos if add_special_tokens is None else add_special_tokens
        if bos and ids[:1] != [self.prefix_token_id]:
            return [self.prefix_token_id, *ids]
        return ids

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template, for lm-eval's record."""
        return self._template.source if self._template else ""

    def apply_chat_template(
        self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation, with the beginning of an answer or to go on in its last
        turn."""
        assert self._template is not None
        turns = [chat.parse_turn(turn) for turn in chat_history]
        text = self._template.render(turns, prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = str(chat_history[-1]["content"]).rstrip()
        return text[: text.rindex(last) + len(last)]

    def _loglikelihood_tokens(
        self, requests: Sequence, disable_tqdm: bool = False, **_: Any
    ) -> list:
        rows = []
        for _, question, continuation in requests:
            if not continuation:
                raise UserError("a task has an answer that adds no token to its question")
            # An empty question was only white space: lm-eval has moved it to the answer, and its hf
            # model stops at an assertion.
            context = list(question) or [self.prefix_token_id]
            ids = (context + list(continuation))[-(self.max_length + 1) :]
            if len(continuation) >= len(ids):
                raise UserError(
                    f"a task has an answer of {len(continuation)} tokens, above the model's context"
                    f" of {self.max_length}"
                )
            rows.append(TokenRow(ids, len(ids) - len(continuation)))
        with _progress(len(rows), "log-likelihoods", disable_tqdm) as bar:
            scores = Scorer(self._model, self._tokens)(rows, lambda batch: bar.update(len(batch)))
        return [
            (float(log_probs.sum(dtype="float64")), bool(likeliest.all()))
            for log_probs, likeliest in scores
        ]

    def loglikelihood_rolling(self, requests: Sequence, disable_tqdm: bool = False) -> list[float]:
        """Sums over windows, each with one token of context."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows, counts = [], []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            pairs = list(
                get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            )
            windows += [(None, *make_disjoint_window(pair)) for pair in pairs]
            counts.append(len(pairs))
        answers = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        return [sum(score for score, _ in itertools.islice(answers, count)) for count in counts]

    def generate_until(self, requests: Sequence, disable_tqdm: bool = False) -> list[str]:
        """The answers, each up to the first of its stops."""
        groups: dict[str, list[int]] = {}  # requests with the same options go together
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        batches = [
            batch for numbers in groups.values() for batch in self._batches(requests, numbers)
        ]
        ours: dict[int, str] = {}
        with _progress(len(requests), "generations", disable_tqdm) as bar:
            for turn, (prompts, options) in enumerate(batches):
                if turn % jax.process_count() == jax.process_index():
                    ours |= zip(prompts, self._generate(prompts, options), strict=True)
                bar.update(len(prompts))
        parts = multihost.gather_to_zero("generated", list(ours.items())) or []
        answers = dict(
            multihost.broadcast_from_zero(
                "generated", lambda: list(itertools.chain.from_iterable(parts))
            )
        )
        return [answers[number] for number in range(len(requests))]

    def _batches(
        self, requests: Sequence, numbers: list[int]
    ) -> Iterator[tuple[dict[int, list[int]], GenerationOptions]]:
        """Prompts by the number of their request, the longest first, and the task's options."""
        options = parse_generation_options(requests[numbers[0]].args[1])
        room = self.max_length - options.num_tokens
        if room < 1:
            raise UserError(
                f"a task asks for {options.num_tokens} new tokens, and the model's context is"
                f" {self.max_length}"
            )
        prompts: dict[int, list[int]] = {}
        for number in numbers:
            ids = self.tok_encode(requests[number].args[0]) or [self.prefix_token_id]
            prompts[number] = ids[-room:]
        waiting = sorted(numbers, key=lambda number: -len(prompts[number]))
        while waiting:
            count = max(self._tokens // (len(prompts[waiting[0]]) + options.num_tokens), 1)
            yield {number: prompts[number] for number in waiting[:count]}, options
            waiting = waiting[count:]

    def _generate(self, prompts: dict[int, list[int]], options: GenerationOptions) -> list[str]:
        from lm_eval.models.utils import postprocess_generated_text

        ids = list(prompts.values())
        rows = self._model.continued(
            ids,
            options.num_tokens,
            **dataclasses.asdict(options.sampling),
            seed=[self._seed + number for number in prompts],
            ends=[self.eot_token_id],
        )
        # lm-eval's `hf` decodes the new tokens by themselves.
        texts = generation.generate(rows, self._tokenizer, ids, options.stops, follows=False)
        return [postprocess_generated_text(text, options.stops, None) for text in texts]


def _progress(total: int, what: str, disable: bool) -> Progress:
    """Process 0 shows how far it is."""
    return Progress(
        total=total, desc=what, leave=False, disable=disable or not multihost.is_writer()
    )


class LoadedTasks(NamedTuple):
    """Tasks with their data, in lm-eval's own objects."""

    manager: Any  # a TaskManager
    tasks: list[Any]  # Task or Group, one for each name or several for a tag
    generating: list[str]  # the names of those that ask for text


def load_tasks(
    tasks: Sequence[str],
    include_path: str | None = None,
    option: str = "--tasks",
    folder_option: str = "--include_path=DIR",
) -> LoadedTasks:
    """Reads tasks and their data; UserError for one that cannot be run. `option` and
    `folder_option` are what the caller calls them."""
    require(option)
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path)
    where = f" or those of {include_path}" if include_path else ""
    for task in tasks:
        if task not in manager.all_tasks and not task.endswith((".yaml", ".yml")):
            raise UserError(
                f"{option}={task} is not one of lm-eval's {len(manager.all_tasks):,} tasks{where}"
                f"{fields.nearest(task, manager.all_tasks)}; `lm-eval ls tasks` lists them, "
                f"{folder_option} adds a folder of them"
            )
    loaded = LoadedTasks(manager, [], [])
    try:
        for name in tasks:
            definitions = manager.load([name])
            for task in definitions["tasks"].values():
                if task.OUTPUT_TYPE == "generate_until":
                    loaded.generating.append(task.task_name)
            group = definitions["groups"].get(name)
            loaded.tasks.extend([group] if group else definitions["tasks"].values())
        manager.load(loaded.tasks)  # finds a task that is there twice
    except Exception as error:  # YAML, data sets and the network fail in many ways
        raise UserError(
            f"{option}={','.join(tasks)} cannot be loaded: {first_line(error)}"
        ) from None
    return loaded


def run(
    model: ScoredModel,
    tasks: Sequence[str] | LoadedTasks,
    *,
    include_path: str | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    add_bos_token: bool | None = None,
    tokens: int = TOKENS,
    seed: int = 0,
    bootstraps: int = BOOTSTRAPS,
    **options: Any,
) -> dict[str, Any]:
    """The results of lm-eval's simple_evaluate, with the samples of each task.

    Without `bootstraps` no standard errors are drawn. `options` are lm-eval's
    apply_chat_template, system_instruction, fewshot_as_multiturn, gen_kwargs and log_samples.
    """
    loaded = tasks if isinstance(tasks, LoadedTasks) else load_tasks(tasks, include_path)
    import lm_eval

    lm = make_lm(model, add_bos_token, tokens, seed, bool(options.get("apply_chat_template")))
    return lm_eval.simple_evaluate(
        lm,
        tasks=loaded.tasks,
        limit=limit,
        num_fewshot=num_fewshot,
        task_manager=loaded.manager,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=None,
        fewshot_random_seed=FEWSHOT_SEED,
        bootstrap_iters=bootstraps,
        **options,
    )


def figures(results: dict[str, Any]) -> dict[str, dict[str, tuple[float, float | None]]]:
    """{task: {metric: (value, standard error)}} of the results of `run`."""
    tables: dict[str, dict[str, tuple[float, float | None]]] = {}
    for task, values in results.get("results", {}).items():
        for name, value in values.items():
            # "acc,none" and "acc_stderr,none", or another filter than none; beside other facts
            metric, _, filtered_by = name.partition(",")
            if not filtered_by or "_stderr" in metric or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{filtered_by}")
            label = metric if filtered_by == "none" else f"{metric} ({filtered_by})"
            table = tables.setdefault(task, {})
            table[label] = float(value), error if isinstance(error, float) else None
    return tables


def without_nan(value: Any) -> Any:
    """The value with None for numbers that JSON cannot express."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sample_lines(results: dict[str, Any]) -> bytes:
    """Every question with its request and answer, a line of JSON each."""
    lines = []
    for task, samples in results.get("samples", {}).items():
        for sample in samples:
            record = without_nan({"task": task, **sample})
            lines.append(json.dumps(record, default=str, allow_nan=False) + "\n")
    return "".join(lines).encode()
