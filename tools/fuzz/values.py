"""Values for every key of the config, from its declaration in config/fields.py: a new key is fuzzed
by itself.

`any_value` may be right or wrong; `good` is within the declared range, borders included.
"""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from places import places

from zaya_jax import config
from zaya_jax.config import fields
from zaya_jax.config.fields import item_type, optional_type

ODD: tuple[Any, ...] = (
    math.nan,
    math.inf,
    -math.inf,
    -0.0,
    5e-324,
    1e300,
    0,
    1,
    -1,
    2**31,
    2**63,
    -(2**63) - 1,
    10**400,
    True,
    False,
    None,
    "",
    " ",
    "1",
    "nan",
    "a\0b",
    "x\ny",
    "\u00fc\u4e16\U0001f600",
    "\ud800",
    "-",
    "--",
    "x" * 5000,
    b"x",
    1.5,
    [],
    (),
    [1],
    ["a"],
    {},
    {"a": 1},
    [[]],
    [None],
    "%s%n{0}",
    "$HOME",
    "~",
    "../../../..",
)


@functools.cache
def odd(sandbox: Path) -> st.SearchStrategy:
    """Values of any kind."""
    return st.one_of(
        st.sampled_from(ODD),
        st.sampled_from(places(sandbox)),
        st.floats(),
        st.integers(),
        st.text(max_size=20),
    )


@functools.cache
def good(field: dataclasses.Field, sandbox: Path) -> st.SearchStrategy:
    """Values that a key allows, the borders among them."""
    one = _good_item(field, sandbox)
    if isinstance(field.default, tuple):
        return st.lists(one, max_size=3)
    return st.one_of(st.none(), one) if optional_type(field.type) else one


@functools.cache
def any_value(field: dataclasses.Field, sandbox: Path) -> st.SearchStrategy:
    """Good, just beyond, or anything at all."""
    choices = [good(field, sandbox), odd(sandbox)]
    if "range" in field.metadata:
        least, greatest = field.metadata["range"]
        choices.append(
            st.sampled_from(
                [least - 1, greatest + 1, math.nextafter(greatest, math.inf), -greatest]
            )
        )
    return st.one_of(choices)


def _good_item(field: dataclasses.Field, sandbox: Path) -> st.SearchStrategy:
    kind = item_type(field.type)
    if dataclasses.is_dataclass(kind):
        return group(kind, sandbox)
    if "choices" in field.metadata:
        return st.sampled_from(field.metadata["choices"])
    if "kind" in field.metadata:
        weights = st.sampled_from(["", "=1", "=0.5", "=0", "=-1", "=1e300", "=nan", "=x"])
        sources = st.builds(str.__add__, st.sampled_from(places(sandbox)), weights)
        return sources if field.metadata["kind"] == "source" else st.sampled_from(places(sandbox))
    if kind is bool:
        return st.booleans()
    least, greatest = field.metadata["range"]
    if kind is int:
        near = [v for v in (1, 2, 3, 4, 6, 8, 16, 32, 64, 100, 1000) if least <= v <= greatest]
        return st.one_of(st.sampled_from([*near, least, greatest]), st.integers(least, greatest))
    return st.one_of(st.sampled_from([float(least), float(greatest)]), st.floats(least, greatest))


@functools.cache
def group(cls: type, sandbox: Path) -> st.SearchStrategy:
    """A group as a dict: some of its keys, each good or odd; required keys are always there."""
    found = {
        f.name: any_value(f, sandbox)
        for f in dataclasses.fields(cls)
        if not dataclasses.is_dataclass(f.type)
    }
    some = st.lists(st.sampled_from(sorted(found)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: found[name] for name in names})
    )
    if cls is not config.Phase:
        return some
    return st.builds(
        lambda tokens, more: {"tokens": tokens, **more},
        st.sampled_from([256, 300, 2000, 10**6]),
        some,
    )


def keys() -> dict[str, dataclasses.Field]:
    """Every key with its declaration."""
    return dict(fields.leaves(config.Config))


@functools.cache
def some_keys(sandbox: Path, value: Any = any_value, most: int = 3) -> st.SearchStrategy:
    """{key: value} of one key or a few."""
    found = {name: value(field, sandbox) for name, field in keys().items()}
    return st.lists(st.sampled_from(sorted(found)), min_size=1, max_size=most, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: found[name] for name in names})
    )
