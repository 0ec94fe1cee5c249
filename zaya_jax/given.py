"""Reads the arguments of `zaya_jax.library`: configs, meshes, folders, arrays; UserError if one cannot be used."""

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
from zaya_jax.checkpoint import claims
from zaya_jax.config import Config, Precision, UserError, fields, load, shown
from zaya_jax.parallel import sharding
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.parallel.spread import AXES, spread_of

type AnyConfig = Config | ConfigDict | Mapping[str, Any] | str | os.PathLike
type AnyMesh = Mesh | Mapping[str, Any]


def config_of(given: AnyConfig) -> Config:
    """The checked config of anything that holds one; a name stands for a file in experiments/configs."""
    if isinstance(given, Config):
        given = config_lib.to_dict(given)
    if isinstance(given, Mapping | ConfigDict):
        return config_lib.check(given if isinstance(given, ConfigDict) else dict(given))
    name, colon, argument = str(given).partition(":")
    if name.isidentifier() and not Path(name).exists():
        names = sorted(path.stem for path in load.SHIPPED.glob("[a-z]*.py"))
        if name not in names:
            raise UserError(f"config={shown(name)} is not a file or one of {', '.join(names)}")
        return load.read_config(f"experiments/configs/{name}.py{colon}{argument}")
    return load.read_config(str(given))


def with_mesh(config: Config, mesh: AnyMesh | None) -> tuple[Config, Mesh | None]:
    """The config with this mesh, and the mesh of all four axes; UserError if model or devices do not fit it."""
    if mesh is None:
        return config, None
    if isinstance(mesh, Mesh):
        unknown = [axis for axis in mesh.axis_names if axis not in AXES]
        if unknown:
            raise UserError(f"mesh has an axis {unknown[0]!r}; the axes are {', '.join(AXES)}")
        sizes: dict[str, Any] = {axis: mesh.shape.get(axis, 1) for axis in AXES}
        order = [mesh.axis_names.index(axis) for axis in AXES if axis in mesh.axis_names]
        devices = list(mesh.devices.transpose(order).flat)
        given = dataclasses.replace(config.mesh, **sizes)
    else:
        given = fields.build(config_lib.Mesh, dict(mesh), "mesh.")
        fields.check_fields(given, "mesh.")
        devices = jax.local_devices()
    over = make_mesh(given, devices, "mesh")
    config = dataclasses.replace(config, mesh=given)
    sharding.check(config, spread_of(given, over.shape), where="mesh")
    return config, over


def as_begun(config: Config, tokenizer: Path | None) -> Config:
    """The config of a run that begins with a model as it is: one phase, its own weights."""
    run = dataclasses.replace(config.run, init_from="", fork="", fork_step=0, fork_tokens=0)
    data = config.data
    if config.schedule.phases:
        data = dataclasses.replace(data, micro_batch=0)
    if tokenizer:
        data = dataclasses.replace(data, tokenizer=str(tokenizer))
    plain = dataclasses.replace(config.schedule, phases=())
    begun = dataclasses.replace(config, run=run, data=data, schedule=plain, mesh=config_lib.Mesh())
    return config_lib.check(config_lib.to_dict(begun))


def with_dtype(config: Config, dtype: str | None) -> Config:
    """The config whose matrices multiply in this dtype."""
    if dtype is None:
        return config
    exact = dtype == "float32"
    precision = Precision(compute=dtype, router="float32", matmul="highest" if exact else "default")
    return dataclasses.replace(config, precision=precision)


def new_folder(directory: str | os.PathLike) -> Path:
    """A folder that can be created."""
    fields.check_path("directory", os.fspath(directory))
    return claims.new_folder(directory, "directory")


def integers(name: str, given: Any, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """Integers [B, S], or of this shape."""
    x = np.asarray(given)
    if x.ndim != 2 or not np.issubdtype(x.dtype, np.integer) or not x.size:
        raise UserError(f"{name} have shape {x.shape} and dtype {x.dtype}; expected integers [B, S]")
    if shape is not None and x.shape != shape:
        raise UserError(f"{name} have shape {x.shape}; expected that of the ids, {shape}")
    return x


def texts(prompt: Any) -> list[str] | None:
    """The prompts where they are texts, one or several; None if they are ids."""
    found = [prompt] if isinstance(prompt, str) else np.asarray(prompt, object).ravel().tolist()
    return found if found and all(isinstance(text, str) for text in found) else None


def require_one_process() -> None:
    """UserError in one of several processes."""
    if jax.process_count() > 1:
        raise UserError("a model object is of one process; several train by experiments.pretrain")
