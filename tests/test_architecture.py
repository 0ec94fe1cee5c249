"""The project's rules that a test can check: imports, lengths of files, forbidden words."""

import ast
import collections
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = (".ci", "benchmarks", "docs", "launch", "requirements", "tests", "tools")
PACKAGES = ("experiments", "pallas_kernels", "zaya_jax")
MAX_LINES = 600  # of a file
LONGEST, MOST_PARAMETERS = 80, 10  # of a function, not counting `self`

# Statements (`ast.stmt`) at most. Wrapping a line adds none, so packing saves nothing. A room has
# some 3% of air for mends, the library and the tests as a whole 1%; whoever needs more takes
# something away first, or raises the row with its reason.
BUDGET = {
    "zaya_jax/aegis": 2_470,
    "zaya_jax/checkpoint": 2_460,
    "zaya_jax/cluster": 1_120,
    "zaya_jax/compiled": 620,
    "zaya_jax/config": 630,
    "zaya_jax/data": 1_195,
    "zaya_jax/evaluate": 510,
    "zaya_jax/guard": 640,
    "zaya_jax/hardware": 625,
    "zaya_jax/model": 1_695,
    "zaya_jax/optim": 1_435,
    "zaya_jax/parallel": 1_010,
    "zaya_jax/plan": 900,
    "zaya_jax/pytorch": 1_150,
    "zaya_jax/report": 1_115,
    "zaya_jax/text": 2_160,
    "zaya_jax/training": 1_845,
    "zaya_jax/*.py": 1_565,
    "zaya_jax": 22_670,
    "pallas_kernels": 3_935,
    "experiments": 2_500,
    "benchmarks": 1_550,
    "tools": 1_830,
    "tests": 16_055,
}

# What takes seconds to import, or not every user has: the only modules that may import it.
HEAVY = {
    "datasets": ["zaya_jax.text.hub"],
    "grain": ["zaya_jax.data", "zaya_jax.data.pipeline"],
    "huggingface_hub": [
        "zaya_jax.pytorch.any_model",
        "zaya_jax.pytorch.card",
        "zaya_jax.pytorch.hub",
        "zaya_jax.pytorch.tensor_files",
    ],
    "mlflow": ["zaya_jax.training.trackers"],
    "orbax": ["zaya_jax.checkpoint.handler", "zaya_jax.checkpoint.orbax_source"],
    "jinja2": ["zaya_jax.report.document", "zaya_jax.text.chat_template"],
    "lm_eval": ["zaya_jax.evaluate.harness"],
    "pyarrow": ["zaya_jax.text.inputs"],
    "safetensors": ["zaya_jax.pytorch.tensor_files"],
    "tensorboardX": ["zaya_jax.training.trackers"],
    "tokenizers": ["zaya_jax.text.tokenizers"],
    "trackio": ["zaya_jax.training.trackers"],
    "wandb": ["zaya_jax.training.trackers"],
} | {name: [] for name in ("absl", "sentencepiece", "torch", "transformers")}

# The parts of this project that a module may import. The first name that fits a module counts.
ARROWS = {
    "zaya_jax.aegis": ("zaya_jax.aegis", "zaya_jax.checkpoint.folders", "zaya_jax.cluster"),
    "zaya_jax.checkpoint.run": (
        "zaya_jax.checkpoint",
        "zaya_jax.cluster",
        "zaya_jax.config",
        "zaya_jax.trees",
    ),
    # what a checkpoint is knows nothing of what a run does with it
    "zaya_jax.checkpoint": (
        *(
            f"zaya_jax.checkpoint.{path.stem}"
            for path in (ROOT / "zaya_jax/checkpoint").iterdir()
            if path.stem != "run"
        ),
        "zaya_jax.cluster",
        "zaya_jax.config",
        "zaya_jax.model",
        "zaya_jax.schedule",
        "zaya_jax.trees",
    ),
    "zaya_jax.config": ("zaya_jax.config", "pallas_kernels.chip"),
    "zaya_jax.model": ("zaya_jax.config", "zaya_jax.model", "zaya_jax.trees", "pallas_kernels"),
    "zaya_jax.parallel": (
        "zaya_jax.config",
        "zaya_jax.model",
        "zaya_jax.parallel",
        "pallas_kernels",
    ),
    "zaya_jax.text": ("zaya_jax.config", "zaya_jax.text"),
    "zaya_jax": ("zaya_jax", "pallas_kernels"),
    "pallas_kernels.tune": ("pallas_kernels", "zaya_jax"),  # a program, for a run's config
    "pallas_kernels": ("pallas_kernels",),
    "experiments": ("experiments", "zaya_jax", "pallas_kernels"),
}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def modules() -> list[tuple[str, Path]]:
    """Every module of the three packages, by its dotted name."""
    found = []
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def imports(module: str, path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and full name of everything that a module imports, inside its functions
    too."""
    parents = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{origin}.{alias.name}"


def forbidden_imports(module: str, path: Path) -> list[str]:
    """The imports that break the arrows, each as a sentence."""
    allowed = next(targets for package, targets in ARROWS.items() if within(module, package))
    return [
        f"{module}, line {line}, imports {name}; of this project it may import only"
        f" {', '.join(allowed)}"
        for line, name in imports(module, path)
        if name.split(".")[0] in (*PACKAGES, "tests", "benchmarks", "tools")
        and not any(within(name, target) for target in allowed)
    ]


def texts() -> list[tuple[str, str]]:
    """Every text file that belongs to the project, by its path."""
    # a worktree has a file
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    files += [
        path for room in (*ROOMS, *PACKAGES) for path in (ROOT / room).rglob("*") if path.is_file()
    ]
    found = []
    for path in files:
        if not {"__pycache__", ".ipynb_checkpoints"} & {*path.parts}:
            try:
                found.append((str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")))
            except UnicodeDecodeError:
                continue  # a picture, a tensor
    return found


def test_every_import_follows_the_arrows():
    broken = [line for name, path in modules() for line in forbidden_imports(name, path)]
    assert modules() and not broken, "\n".join(broken)


def package_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def test_packages_import_each_other_in_no_circle():
    arrows = collections.defaultdict[str, set[str]](set)
    for module, path in modules():
        imported = {package_of(name) for _, name in imports(module, path)}
        ours = {name for name in imported if name.startswith(("zaya_jax.", "pallas_kernels."))}
        arrows[package_of(module)] |= ours - {package_of(module)}
    order = list(graphlib.TopologicalSorter(arrows).static_order())
    for upwards in ("model", "parallel", "training"), ("config", "checkpoint", "training"):
        ranks = [order.index(f"zaya_jax.{name}") for name in upwards]
        assert ranks == sorted(ranks)


LIBRARY = ("zaya_jax.library", "zaya_jax.functions")
# which no other part imports
ABOVE = ("zaya_jax.evaluate", "experiments.evaluate", "experiments.generate")


def test_nothing_but_evaluation_imports_the_library():
    """It may import programs, and so do all its importers."""
    found = {
        module
        for module, path in modules()
        if module not in ("zaya_jax", *LIBRARY) and not any(within(module, part) for part in ABOVE)
        for _, name in imports(module, path)
        if any(within(name, part) for part in LIBRARY)
    }
    assert not found


ASKS_WHERE_IT_IS = re.compile(
    r"\b(?:p(?:sum|max|min|mean|permute|broadcast|sum_scatter)|all_gather|all_to_all|ragged_all_to_all|axis_index|axis_size)\b"
    r"|\bisinstance\(here\b|\b(?:spread|tsp|ring)\b"
)


@pytest.mark.parametrize("name", ["cca", "dense", "layer", "router", "experts", "weights"])
def test_no_layer_asks_where_its_tokens_and_weights_lie(name):
    """Weights are simply local; other devices' data come through `placement`."""
    tree = ast.parse((ROOT / "zaya_jax" / "model" / f"{name}.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):  # docstrings and comments may mention it
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
    assert not ASKS_WHERE_IT_IS.findall(ast.unparse(tree))


ASKS_THE_MACHINE = re.compile(r"\bdefault_backend\b|\bplatform_dependent\b")


def test_no_program_is_made_by_asking_which_machine_makes_it():
    """A program is made for a chip (`pallas_kernels.chip`), which need not be there."""
    asked = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for _, path in modules()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if ASKS_THE_MACHINE.search(line)
    ]
    assert not asked, "\n".join(asked)


OF_CPUS = re.compile(r"\boptimization_barrier\b|\bwith_layout_constraint\b|\bpallas_kernels\.cpu\b")
MAY_BE_OF_CPUS = {  # the order of an update, and of reading before writing, which only a CPU needs
    "zaya_jax/model/cache.py",
    "zaya_jax/optim/chain.py",
}


def test_what_serves_cpus_alone_stands_in_their_files():
    """Barriers and orders in memory are facts of one backend, so they belong in the operator's
    `cpu.py`."""
    found = {
        str(path.relative_to(ROOT))
        for _, path in modules()
        if path.name != "cpu.py" and OF_CPUS.search(path.read_text(encoding="utf-8"))
    }
    assert found == MAY_BE_OF_CPUS


def test_no_program_text_is_longer_than_a_person_reads():
    long = {
        name: text.count("\n")
        for name, text in texts()
        if name.endswith((".py", ".sh", ".js", ".css", "Makefile"))
    }
    assert not {name: lines for name, lines in long.items() if lines > MAX_LINES}


def statements_of(pattern: str) -> int:
    found = [ROOT / pattern] if "*" not in pattern else ROOT.glob(pattern)
    files = [file for path in found for file in (path.rglob("*.py") if path.is_dir() else [path])]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    return sum(isinstance(node, ast.stmt) for tree in trees for node in ast.walk(tree))


@pytest.mark.parametrize("room", BUDGET)
def test_a_room_keeps_its_budget_of_statements(room):
    number, most = statements_of(room), BUDGET[room]
    assert 0 < number <= most, (
        f"{room} has {number:,} statements, and its budget is {most:,}: take something away (what "
        "does no test or document need?), or raise its row in BUDGET and give the reason in the "
        "commit's body"
    )


def test_every_room_has_a_budget():
    rooms = {f"zaya_jax/{path.parent.name}" for path in (ROOT / "zaya_jax").glob("*/__init__.py")}
    around = {path.parent.name for path in ROOT.glob("*/*.py") if "venv" not in path.parent.name}
    assert rooms | around <= set(BUDGET)


def too_much(source: str) -> list[str]:
    """The functions of a module that are too long, or take too much."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # Options with a default, by name alone, are no burden: editors complete them.
            asked = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            required = [argument for argument, default in asked if default is None]
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *required)]
            count, length = len(names) - (names[:1] == ["self"]), node.end_lineno - node.lineno + 1
            if length > LONGEST or count > MOST_PARAMETERS:
                found.append(f"{node.name}: {length} lines, {count} parameters")
    return found


def test_a_function_fits_a_screen_and_takes_ten_things():
    found = {
        name: more
        for name, path in modules()
        if (more := too_much(path.read_text(encoding="utf-8")))
    }
    assert not found
    assert too_much("def f():\n" + "    pass\n" * LONGEST) and too_much(
        "def f(a, b, c, d, e, f, g, h, i, j=1, k=1): 0"
    )


def test_heavy_packages_are_imported_where_the_table_says():
    found = collections.defaultdict(set)
    for name, path in modules():
        for _, what in imports(name, path):
            found[what.split(".")[0]].add(name)
    assert {package: sorted(found[package]) for package in HEAVY} == HEAVY


# The one public class of a name that another has (26 November 2026); none may be added.
STAND_TWICE = {"Guard"}


def test_no_public_class_name_stands_twice():
    """A reader who meets a name for the second time takes it for the first."""
    classes = collections.Counter(
        node.name
        for name, path in modules()
        if name.split(".")[0] in ("zaya_jax", "pallas_kernels")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert len(classes) > 200
    assert {name for name, count in classes.items() if count > 1} <= STAND_TWICE


TELLTALE = re.compile(
    r"(?<![\w.~:/$}-])/(?:root|home|Users|work|farm)/\w|(?:index|registry)[-_]?url|/simple[/]", re.I
)


def test_no_file_names_a_folder_of_one_machine_or_a_package_host():
    named = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), start=1)
        if TELLTALE.search(line)
    ]
    assert not named, "\n".join(named)


def test_files_that_the_documents_name_are_there():
    # after a colon: the file of a commit, as git names it
    named = re.compile(
        r"(?<!:)\b(?:tests|zaya_jax|benchmarks|experiments|pallas_kernels|launch|tools)/[\w/]+\.(?:py|md|svg|png|sh)"
    )
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
    ]
    # names tests by their place under tests/; held below
    pages.remove(ROOT / "docs" / "promises.md")
    gone = {
        f"{page.name}: {name}"
        for page in pages
        for name in named.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / name).exists()
    }
    assert not gone


def test_every_promise_names_the_test_that_holds_it():
    page = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    rows = [
        line for line in page.splitlines() if line.startswith("| ") and line != "| promise | test |"
    ]
    named = {row: re.findall(r"`([\w/]+(?:\.py|/))`", row.rsplit("|", 2)[1]) for row in rows}
    assert len(rows) > 60 and len(page.encode()) <= 20 * 1024
    assert not [row for row, tests in named.items() if not tests]
    assert not {
        test for tests in named.values() for test in tests if not (ROOT / "tests" / test).exists()
    }


def test_no_two_files_of_tests_have_one_name():
    """pytest imports them by name alone, and a whole run would end at the second."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
