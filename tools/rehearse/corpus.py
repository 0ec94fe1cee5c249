"""Makes the rehearsal's corpus and its lm-eval tasks from what a machine has, without a network.

| file | holds |
|---|---|
| web.jsonl | prose: documentation of the standard library and of installed packages |
| code.jsonl | source files of the standard library |
| math.jsonl | sums and differences, one document for each dozen |
| reasoning.jsonl | chats: long lists of pairs, a question for one of them, reasoning, the answer |
| chat.jsonl | short chats: sums with reasoning, and weather questions that need a tool call |
| tasks/*.yaml, *.jsonl | held-out sums, tool calls and needles of each length, as multiple choice |

The same Python and packages give the same files. Names and numbers of a task occur in no training
document.
"""

import ast
import json
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

NAMES = [
    "ada",
    "bob",
    "cleo",
    "dan",
    "eve",
    "finn",
    "gus",
    "hana",
    "ivo",
    "jon",
    "kim",
    "lea",
    "max",
    "nina",
    "otto",
    "pia",
    "quin",
    "ria",
    "sam",
    "tess",
]
CITIES = [
    "Oslo",
    "Rome",
    "Lima",
    "Bonn",
    "Cairo",
    "Kyoto",
    "Quito",
    "Riga",
    "Seoul",
    "Turin",
    "Porto",
    "Minsk",
]
TOOL = [{"type": "function", "function": {"name": "weather", "parameters": {"city": "string"}}}]
EVERYBODY = [f"{name} {letter}" for name in NAMES for letter in "abcdefghijklmnopqrstuvwxyz"]
LINE = 7.0  # tokens of a line of such lists, with the rehearsal's tokenizer


def make(folder: Path, mib: float, contexts: Sequence[int]) -> None:
    """Writes all parts, each of `mib` MiB at most, with needles of these contexts in tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    longest = contexts[-1]
    parts = {
        "web": ({"text": text} for text in prose()),
        "code": ({"text": text} for text in code()),
        "math": ({"text": text} for text in sums(random.Random(1))),
        "reasoning": needles(random.Random(2), contexts),
        "chat": chats(random.Random(3)),
    }
    for name, part in parts.items():
        _write(folder / f"{name}.jsonl", part, int(mib * 2**20))
    (folder / "tasks").mkdir(exist_ok=True)
    chosen = random.Random(4)
    task(
        folder / "tasks",
        "rehearsal_sums",
        [sum_question(chosen, held_out=True) for _ in range(200)],
    )
    task(folder / "tasks", "rehearsal_tools", [tool_question(chosen) for _ in range(100)])
    for context in (contexts[0] * 4, longest):
        questions = [needle_question(chosen, context) for _ in range(60)]
        task(folder / "tasks", f"rehearsal_needle_{context}", questions)


def _write(path: Path, records: Iterator[dict[str, Any]], most: int) -> None:
    """Writes records until the file has so many bytes."""
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            size += file.write(json.dumps(record) + "\n")
            if size >= most:
                break


def prose() -> Iterator[str]:
    """Texts of installed packages, and the docstrings of their modules and of the standard
    library's."""
    packages = Path(sysconfig.get_path("purelib"))
    for path in sorted(
        {*packages.glob("*.dist-info/METADATA"), *packages.rglob("*.md"), *packages.rglob("*.rst")}
    ):
        text = path.read_text(encoding="utf-8", errors="ignore")
        if len(re.findall(r"\b[a-z]{3,}\b", text)) * 14 > len(text) > 1000:  # sentences, not tables
            yield text
    for path in sorted(
        {*Path(sysconfig.get_path("stdlib")).glob("*.py"), *packages.glob("*/*.py")}
    ):
        try:
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="ignore"))))
        except (SyntaxError, ValueError):  # a test file of some package, on purpose
            continue
        owners = [
            node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        ]
        text = "\n\n".join(filter(None, map(ast.get_docstring, owners)))
        if len(text) > 1000:
            yield text


def code() -> Iterator[str]:
    """Source files of the standard library, without tests and idle."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if not {"site-packages", "test", "tests", "idlelib"} & {*path.parts}:
            yield path.read_text(encoding="utf-8", errors="ignore")


def _held_out(a: int, b: int) -> bool:
    """Whether a pair of numbers is for the task alone: a fifth of all."""
    return (7 * a + 3 * b) % 5 == 0


def _pair(chosen: random.Random, held_out: bool = False) -> tuple[int, int]:
    while True:
        a, b = chosen.randrange(10), chosen.randrange(10)
        if _held_out(a, b) == held_out:
            return a, b


def sums(chosen: random.Random) -> Iterator[str]:
    """Lines such as 3 + 5 = 8."""
    while True:
        pairs = [_pair(chosen) for _ in range(12)]
        yield "".join(f"{a} + {b} = {a + b}\n" for a, b in pairs)


def sum_question(chosen: random.Random, held_out: bool = False) -> dict[str, Any]:
    """A sum that no document has, after three that show the form."""
    a, b = _pair(chosen, held_out)
    before = "".join(f"{c} + {d} = {c + d}\n" for c, d in (_pair(chosen) for _ in range(3)))
    return _choice(chosen, f"{before}{a} + {b} =", a + b, range(19))


def _pairs(chosen: random.Random, tokens: float) -> dict[str, int]:
    """Names and numbers whose lines fill so many tokens."""
    count = max(2, int(tokens / LINE))
    return {
        name: chosen.randrange(10) for name in chosen.sample(EVERYBODY, min(count, len(EVERYBODY)))
    }


def _lines(pairs: Iterable[tuple[str, int]]) -> str:
    return "".join(f"{name} has {number}.\n" for name, number in pairs)


def needles(chosen: random.Random, contexts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Chats: a list in a third of a context, names in another order, and a reasoning that finds the
    line of each."""
    while True:
        pairs = _pairs(chosen, chosen.choice(contexts) // 3)
        asked = chosen.sample(list(pairs), max(1, len(pairs) // 2))
        question = f"{_lines(pairs.items())}What have {', '.join(asked)}?"
        lines = [(name, pairs[name]) for name in asked]
        answer = f"Together {sum(number for _, number in lines)}."
        again = chosen.choice((1, 1, 1, 5))  # long reasoning is what trimming is for
        turn = {"role": "assistant", "reasoning": _lines(lines) * again, "content": answer}
        yield {"messages": [{"role": "user", "content": question}, turn]}


def needle_question(chosen: random.Random, context: int) -> dict[str, Any]:
    """A list of a context's length, and the beginning of the line that is to be found in it
    again."""
    pairs = _pairs(chosen, context - 3 * LINE)
    name = chosen.choice(list(pairs))
    return _choice(chosen, f"{_lines(pairs.items())}{name} has", pairs[name], range(10))


def chats(chosen: random.Random) -> Iterator[dict[str, Any]]:
    """Sums, and calls of a tool with its result."""
    while True:
        if chosen.random() < 0.5:
            a, b = _pair(chosen)
            reasoning = f"{a} + {b} = {a + b}"
            turns = [{"role": "user", "content": f"What is {a} + {b}?"}]
            turns += [{"role": "assistant", "reasoning": reasoning, "content": str(a + b)}]
            yield {"messages": turns}
            continue
        city, degrees = chosen.choice(CITIES), chosen.randrange(30)
        call = {"function": {"name": "weather", "arguments": {"city": city}}}
        yield {
            "tools": TOOL,
            "messages": [
                {"role": "user", "content": f"How warm is it in {city}?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": str(degrees)},
                {"role": "assistant", "content": f"{degrees} degrees in {city}."},
            ],
        }


def tool_question(chosen: random.Random) -> dict[str, Any]:
    """The city that a call must name; the other choices are other cities."""
    city = chosen.choice(CITIES)
    question = f"How warm is it in {city}?\n" + '{"name": "weather", "arguments": {"city": "'
    others = chosen.sample([other for other in CITIES if other != city], 3)
    return {
        "question": question,
        "right": city,
        **{f"wrong{i}": other for i, other in enumerate(others)},
    }


def _choice(chosen: random.Random, question: str, right: int, among: range) -> dict[str, Any]:
    others = chosen.sample([value for value in among if value != right], 3)
    wrong = {f"wrong{i}": f" {value}" for i, value in enumerate(others)}
    return {"question": question, "right": f" {right}", **wrong}


def task(folder: Path, name: str, records: list[dict[str, Any]]) -> None:
    """A task of lm-eval: the first of four choices is right."""
    data = folder.absolute() / f"{name}.jsonl"
    _write(data, iter(records), 2**40)
    lines = [
        f"task: {name}",
        "dataset_path: json",
        f"dataset_kwargs: {{data_files: {{test: {json.dumps(str(data))}}}}}",
        "test_split: test",
        "output_type: multiple_choice",
        'doc_to_text: "{{question}}"',
        'doc_to_choice: "{{[right, wrong0, wrong1, wrong2]}}"',
        "doc_to_target: 0",
        'target_delimiter: ""',
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]",
    ]
    (folder / f"{name}.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
