"""A model small enough for tests, with weights big enough that errors show."""

import dataclasses
from typing import Any

import jax
import numpy as np

from fixbin_jax.config import (
    ComputeConfig,
    Config,
    InputConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from fixbin_jax.model import Params
from fixbin_jax.sharding import Placement, make_placement

MODEL = ModelConfig(
    vocab_size=304, width=32, num_layers=2, num_heads=8, context_length=16, init_std=0.3
)
INPUTS = {name: InputConfig(name) for name in ("learned", "binary", "affine")}
CONFIG = Config(
    model=MODEL,
    train=TrainConfig(num_steps=20, batch_size=16),
    compute=ComputeConfig(loss_rows=24),
)


def change(config: Config, **groups: dict[str, Any]) -> Config:
    """The config with keys of its groups replaced: change(c, train={"seed": 1})."""
    replaced = {
        name: dataclasses.replace(getattr(config, name), **keys) for name, keys in groups.items()
    }
    return dataclasses.replace(config, **replaced)


def change_whole(config: Config, **groups: Any) -> Config:
    """The config with whole groups replaced."""
    return dataclasses.replace(config, **groups)


def placement(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Placement:
    """A mesh of the first devices."""
    devices = jax.devices()[: data * fsdp * tensor]
    return make_placement(MeshConfig(data, fsdp, tensor), devices)


def batch(config: Config, seed: int = 0, counted: float = 0.7) -> dict[str, np.ndarray]:
    """Random ids, of which a random share is counted, unevenly over the rows."""
    rng = np.random.default_rng(seed)
    shape = (config.train.batch_size, config.model.context_length)
    ids = rng.integers(0, config.model.vocab_size, (shape[0], shape[1] + 1), np.int32)
    mask = rng.random(shape) < counted * np.linspace(0.1, 1.3, shape[0])[:, None]
    return {"ids": ids[:, :-1], "targets": ids[:, 1:], "mask": mask}


def leaves(params: Params) -> dict[str, Any]:
    """Parameters, or their shapes, by dotted name."""
    found = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in found}


def randomised(params: Params, seed: int = 0) -> Params:
    """The same parameters with every bias and norm moved away from 0 and 1."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + 0.2 * rng.standard_normal(x.shape).astype(np.float32), params)


def largest_difference(a: Params, b: Params) -> float:
    """Over all arrays, the largest difference as a share of the array's largest value."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(
        float(np.abs(np.asarray(x) - np.asarray(y)).max() / np.abs(np.asarray(x)).max())
        for x, y in pairs
    )
