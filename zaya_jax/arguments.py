"""Checks what callers of the library give, and completes it: configs, meshes, arrays of ids."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from zaya_jax import config as config_lib
from zaya_jax.checkpoint.run import claims
from zaya_jax.config import Config, Precision, UserError, fields, shown
from zaya_jax.model.own_parts import as_named
from zaya_jax.parallel import sharding
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.parallel.spread import spread_of

type AnyConfig = Config | ConfigDict | Mapping[str, Any] | str | os.PathLike


def config_of(given: AnyConfig) -> Config:
    """The checked config of anything that holds one; a name stands for a file in
    experiments/configs."""
    if isinstance(given, Config):
        given = config_lib.to_dict(given)
    if isinstance(given, Mapping | ConfigDict):
        given = given if isinstance(given, ConfigDict) else dict(given)
        # a model alone needs no data, whose rows could be longer than it takes
        if set(given) == {"model"}:
            model = config_lib.check_model(dict(given["model"]))
            rows = min(config_lib.Data.seq_len, model.max_position_embeddings)
            given = {"model": config_lib.to_dict(model), "data": {"seq_len": rows}}
        return as_named(config_lib.check(given))
    name, colon, argument = str(given).partition(":")
    if name.isidentifier() and not Path(name).exists():
        names = sorted(path.stem for path in config_lib.SHIPPED.glob("[a-z]*.py"))
        if name not in names:
            raise UserError(f"config={shown(name)} is not a file or one of {', '.join(names)}")
        given = f"experiments/configs/{name}.py{colon}{argument}"
    return as_named(config_lib.read_config(str(given)))


def with_mesh(config: Config, mesh: Mapping[str, Any] | None) -> tuple[Config, Mesh | None]:
    """The config with this mesh, and the mesh of all four axes; UserError if model or devices do
    not fit it."""
    if mesh is None:
        return config, None
    given = fields.build(config_lib.Mesh, dict(mesh), "config.mesh.")
    device_mesh = make_mesh(given, jax.local_devices(), "mesh")
    config = dataclasses.replace(config, mesh=given)
    sharding.check(config, spread_of(given, device_mesh.shape), where="mesh")
    return config, device_mesh


def as_begun(config: Config, tokenizer: Path | None) -> Config:
    """The config of a run that begins with a model as it is: one phase, its own weights."""
    run = dataclasses.replace(
        config.run, init_from="", preference="none", fork="", fork_step=0, fork_tokens=0
    )
    data = config.data
    if config.schedule.phases:
        data = dataclasses.replace(data, micro_batch=0)
    if tokenizer:
        data = dataclasses.replace(data, tokenizer=str(tokenizer))
    plain = dataclasses.replace(config.schedule, phases=())
    begun = dataclasses.replace(config, run=run, data=data, schedule=plain, mesh=config_lib.Mesh())
    config_lib.check(config_lib.to_dict(begun))
    return begun


def with_dtype(config: Config, dtype: str | None) -> Config:
    """The config whose matrices multiply in this dtype."""
    if dtype is None:
        return config
    matmul = "highest" if dtype == "float32" else "default"
    return dataclasses.replace(
        config, precision=Precision(compute=dtype, router="float32", matmul=matmul)
    )


def new_folder(directory: str | os.PathLike) -> Path:
    """A folder that can be created."""
    fields.check_path("directory", os.fspath(directory))
    return claims.require_new_folder(directory)


def integers(
    name: str, given: Any, shape: tuple[int, ...] | None, end: int, also: int | None = None
) -> np.ndarray:
    """Integers [B, S], or of this shape: from 0 to below `end`, and `also`."""
    x = np.asarray(given)
    of_shape = x.shape == shape if shape else x.ndim == 2 and x.size
    if not of_shape or not np.issubdtype(x.dtype, np.integer):
        raise UserError(
            f"{name} have shape {x.shape} and dtype {x.dtype}; expected integers"
            f" {shape or '[B, S]'}"
        )
    wrong = x[((x < 0) | (x >= end)) & (x != also)]
    if wrong.size:
        raise UserError(
            f"{name} hold {wrong[0]}; expected 0 to {end - 1:,}" + (f", or {also}" if also else "")
        )
    return x.astype(np.int32)
