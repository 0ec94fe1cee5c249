"""Every key of the config is declared with its range and meaning, and checked by name; a config
file that gives no config ends in one line in any case; changed keys are read as their types."""

import dataclasses
import functools
import math
import operator
from pathlib import Path

import pytest
from ml_collections import config_dict
from refusals import refusal

from zaya_jax import cli, config
from zaya_jax.config import fields, keys, read_config
from zaya_jax.config.fields import item_type

GROUPS = [cls for cls in vars(keys).values() if dataclasses.is_dataclass(cls)]
PHASE = {"tokens": 100}


def every_field():
    return [(cls, field) for cls in GROUPS for field in dataclasses.fields(cls)]


def path_of(cls, field):
    """The key as messages name it; phases' in the first one."""
    if cls is config.Phase:
        return f"schedule.phases[0].{field.name}"
    found = [p for p, f in fields.leaves(config.Config) if f is field]
    # a rotary embedding's stands there of either kind
    return found[0] if len(found) == 1 else f"model.rope_parameters.hybrid.{field.name}"


def with_value(path, value):
    """The default config with one key changed, as nested dicts, which check no types."""
    given = config.to_dict(config.Config())
    if path.startswith("schedule.phases[0]."):
        given["schedule"]["phases"] = [PHASE | {path.rpartition(".")[2]: value}]
        return given
    *groups, name = path.split(".")
    group = functools.reduce(operator.getitem, groups, given)
    group[name] = value
    return given


def refused(path, value):
    """What is said of a value, which begins with the key."""
    message = refusal(config.check, with_value(path, value))
    assert message.startswith(f"config.{path}"), message
    return message


NUMBERS = [(c, f) for c, f in every_field() if item_type(f.type) in (int, float)]
STRINGS = [(c, f) for c, f in every_field() if item_type(f.type) is str]
ids = lambda case: f"{case[0].__name__}.{case[1].name}"  # noqa: E731


def test_every_key_says_what_it_may_be_and_what_it_means():
    assert len(GROUPS) == 17
    for cls, field in every_field():
        where = f"{cls.__name__}.{field.name}"
        kind = item_type(field.type)
        if dataclasses.is_dataclass(kind) and dataclasses.is_dataclass(field.type):
            assert kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}("), where
            continue
        assert field.metadata.get("meaning"), where
        if kind in (int, float):
            least, greatest = field.metadata["range"]
            assert math.isfinite(least) and math.isfinite(greatest) and least <= greatest, where
        elif kind is str:
            assert ("choices" in field.metadata) != ("kind" in field.metadata), where
        else:
            assert kind is bool or dataclasses.is_dataclass(kind), where


@pytest.mark.parametrize("case", NUMBERS, ids=ids)
def test_every_number_refuses_what_is_none_and_what_is_outside(case):
    least, greatest = case[1].metadata["range"]
    beyond = [least - 1, 2 * greatest + 1, -1e300, 1e300]
    for value in [math.nan, math.inf, -math.inf, *beyond, "1", True, [1], {}]:
        refused(path_of(*case), value)


@pytest.mark.parametrize("case", STRINGS, ids=ids)
def test_every_string_refuses_what_is_none_of_its_kind(case):
    cls, field = case
    path = path_of(cls, field)
    row = isinstance(field.default, tuple)
    bad: list = [1, None, b"x", 1.5, {}]
    if "choices" in field.metadata:
        bad += ["nothing", "\n", " ", "NONE"]
    elif field.metadata["kind"] != "text":
        bad += [" ", "\t"] + ([""] if row or field.default else [])
    for value in bad:
        said = refusal(config.check, with_value(path, [value] if row else value))
        assert said.startswith("config.") and path in said


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (
            "optim.lr",
            math.inf,
            "optim.lr=inf is out of range; it must be at least 0 and at most 1000",
        ),
        ("data.path", "", "data.path='' is empty; give a path"),
        (
            "model.eos_token_id",
            262_272,
            "the vocabulary of model.vocab_size=262272; give an id from 0 to 262271",
        ),
        ("model.attention_dropout", 0.1, "it must be at least 0 and at most 0"),
        ("model.tie_word_embeddings", False, "tie_word_embeddings=False is not one of True"),
        ("schedule.phases[0].mesh", {"expert": 0}, "phases[0].mesh.expert=0 is out of range"),
        ("schedule.phases[0].remat", "all", "'all' is not one of none, elementwise"),
        (
            "schedule.phases[0].mesh",
            3,
            "phases[0].mesh is 3; it is a group of keys, see docs/config.md",
        ),
        ("data.mixture", ["a=1", ""], "mixture[1]='' is empty; give a source"),
    ],
)
def test_what_the_refusal_says(path, value, says):
    said = refusal(config.check, with_value(path, value))
    assert says in said and len(said) < 300


def test_defaults_and_records_pass():
    checked = config.check(config.default())
    for given in (config.Config(), config.to_dict(checked), checked):
        assert config.check(given) == checked == config.Config()
    assert config.check({}) == checked  # an older version's record has fewer keys
    assert isinstance(config.editable(checked), config_dict.ConfigDict)


def test_kernels_are_named_by_their_operators():
    """What takes one is in tests/training/test_step.py."""
    for names in (("all",), ("none",), ("cca_mix",), ("attention", "cca_mix"), ()):
        assert config.check(with_value("kernels", names)).kernels == names
    for names, says in (
        (["cca_mixx"], "kernels[0]='cca_mixx' is not one of"),
        (["cca_mixx"], "did you mean cca_mix?"),
        (["cca_mix", "all"], "'all' and 'none' stand alone"),
        (["attention,cca_mix"], "several are --config.kernels=\"('"),
    ):
        assert says in refused("kernels", names)


START = "from zaya_jax import config\ndef get_config():\n    c = config.default()\n"


def parsed(file, *changes):
    parser = cli.Parser()
    parser.add_config("tiny.py")
    return parser.parse_args([f"--config={file}", *changes]).config


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            "def get_config():\n    raise RuntimeError('boom\\nmore')\n",
            "RuntimeError in line 2: boom)",
        ),
        ("def get_config():\n    return {'name': 'x'}\n", "returns dict, not a ConfigDict"),
        ("def get_config(:\n", "config.py, line 1)"),
        (START + "    c.optim.lrr = 1\n", "unknown config key 'lrr' in line 4; did you mean lr?"),
        (START + "    c.optim.lr = -1.0\n    return c\n", "config.optim.lr=-1.0 is out of range"),
        (None, "is not a file"),
    ],
)
def test_it_is_one_line(tmp_path, content, says):
    file = tmp_path / "config.py"
    file.mkdir() if content is None else file.write_text(content)
    assert says in refusal(parsed, file, "--config.data.path=x")


def test_keys_are_changed_by_their_types():
    changed = parsed(
        "experiments/configs/tiny.py",
        "--config.data.path=1",
        "--config.optim.lr=1e-2",
        "--config.run.num_steps=7",
        "--config.eval.every=3",
        "--config.mesh.fsdp=true",
        "--config.kernels=none",
        "--config.eval.every=4",
        "--config.data.mixture=('a=1', 'b=2')",
    )
    assert (changed.data.path, changed.data.mixture) == ("1", ("a=1", "b=2"))
    assert (changed.optim.lr, changed.run.num_steps, changed.eval.every) == (0.01, 7, 4)
    assert changed.mesh.fsdp is True and changed.kernels == ("none",)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("data.pth=x", "unknown config key config.data.pth; did you mean data.path?"),
        ("checkpoint.every=4", "did you mean checkpoint.every_steps?"),
        ("data.seq_len=1e3", "--config.data.seq_len=1e3: expected a whole number"),
        ("optim.lr=much", "--config.optim.lr=much: expected a number"),
        ("mesh.fsdp", "--config.mesh.fsdp: expected true or false"),
        ("model=tiny", "--config.model=tiny: expected one of its keys, --config.model.KEY=VALUE"),
    ],
)
def test_a_change_that_will_not_do_names_its_key(change, says):
    assert says in refusal(parsed, "experiments/configs/tiny.py", f"--config.{change}")


def test_what_is_shipped_is_found_from_any_folder(tmp_path, monkeypatch):
    """An installed package's pages say --config=experiments/configs/NAME.py too. A file that is
    there comes first."""
    monkeypatch.chdir(tmp_path)
    folder = Path("experiments/configs")
    assert read_config(f"{folder}/tiny.py").name == "tiny"
    assert "needs the weights" in refusal(read_config, f"{folder}/finetune.py")
    there = Path(__file__).resolve().parents[1] / folder
    said = refusal(read_config, f"{folder}/no.py")
    assert "is not a file; give" in said and str(there) in said
    folder.mkdir(parents=True)
    (folder / "tiny.py").write_text(START + "    c.name = 'mine'\n    return c\n")
    assert read_config(f"{folder}/tiny.py").name == "mine"
