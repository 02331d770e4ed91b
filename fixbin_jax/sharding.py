"""Placement: the mesh, and the one table that says what lies along which of its axes."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fixbin_jax.config import Config, MeshConfig
from fixbin_jax.errors import UserError

# Logical axis -> mesh axes. Arrays name their logical axes; nothing else knows the mesh.
RULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "batch": ("data", "fsdp"),
        "layer": (),
        "width": ("fsdp",),
        "heads": ("tensor",),
        "mlp": ("tensor",),
        "vocab": ("tensor",),
        "input_vocab": ("tensor",),
    }
)

Axes = Sequence[str | None]


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh of devices with axes data, fsdp and tensor, seen through RULES."""

    mesh: Mesh

    def mesh_axes(self, logical: str | None) -> tuple[str, ...]:
        """The mesh axes, possibly none, that a logical axis is divided over."""
        return () if logical is None else RULES[logical]

    def parts(self, logical: str | None) -> int:
        """Into how many parts a logical axis is divided."""
        return math.prod(self.mesh.shape[axis] for axis in self.mesh_axes(logical))

    def spec(self, axes: Axes) -> PartitionSpec:
        """The PartitionSpec of an array with these logical axes."""
        return PartitionSpec(*(self.mesh_axes(axis) or None for axis in axes))

    def sharding(self, axes: Axes) -> NamedSharding:
        """The sharding of an array with these logical axes."""
        return NamedSharding(self.mesh, self.spec(axes))

    @cached_property
    def replicated(self) -> NamedSharding:
        """The sharding of what every device holds whole."""
        return self.sharding(())

    def constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        """x, laid out inside a compiled program as its logical axes say."""
        return jax.lax.with_sharding_constraint(x, self.sharding(axes))

    def per_shard(
        self, f: Callable[..., Any], in_axes: Sequence[Axes], out_axes: Any
    ) -> Callable[..., Any]:
        """f run by each device on its own parts of the arguments, which have these logical axes.

        out_axes is one sequence of logical axes for each result, or one for a single result.
        Collectives inside f are f's business; results must agree where they are not divided.
        """
        single = not out_axes or not isinstance(out_axes[0], tuple)
        out_specs = self.spec(out_axes) if single else tuple(self.spec(a) for a in out_axes)
        in_specs = tuple(self.spec(a) for a in in_axes)
        return jax.shard_map(
            f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def put_batch(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """A batch of host arrays, [batch, ...] each, on the devices."""
        sharding = self.sharding(("batch",))
        return {key: jax.device_put(value, sharding) for key, value in batch.items()}


def make_placement(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Placement:
    """The mesh a config asks for, over all devices of the program or those given.

    Raises:
      UserError: sizes that are no sizes, two axes of -1, or a product that is not the number of
        devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    filled = [name for name, size in sizes.items() if size == -1]
    if len(filled) > 1:
        raise UserError(
            f"config.mesh: {' and '.join(filled)} are both -1; only one axis can take what is left"
        )
    for name, size in sizes.items():
        if size < 1 and size != -1:
            raise UserError(f"config.mesh.{name}: {size}, expected a positive size or -1")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(devices) % fixed or (not filled and fixed != len(devices)):
        asked = " x ".join(f"{name}={size}" for name, size in sizes.items())
        why = "does not divide" if filled else "is not"
        raise UserError(
            f"config.mesh: {asked} does not fit {len(devices)} devices: {fixed} {why} "
            f"{len(devices)}"
        )
    for name in filled:
        sizes[name] = len(devices) // fixed
    types = (AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=devices)
    return Placement(mesh)


def single_device() -> Placement:
    """Everything whole on the first device."""
    return make_placement(MeshConfig(), jax.local_devices()[:1])


def check_divisible(config: Config, placement: Placement) -> None:
    """Refuses sizes that the mesh does not divide, before anything is built.

    Raises:
      UserError: naming the config key, its size, and the mesh axes.
    """
    model, train = config.model, config.train
    checks = (
        (
            "train.batch_size / train.micro_batches",
            train.batch_size // train.micro_batches,
            "batch",
        ),
        ("model.width", model.width, "width"),
        ("model.num_heads", model.num_heads, "heads"),
        ("model.mlp_width", model.hidden_width, "mlp"),
        ("model.vocab_size", model.vocab_size, "vocab"),
    )
    for key, size, logical in checks:
        if size % placement.parts(logical):
            axes = " x ".join(f"{a}={placement.mesh.shape[a]}" for a in RULES[logical])
            raise UserError(f"config.{key}: {size} is not divisible by the mesh axes {axes}")
