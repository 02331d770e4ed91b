import functools

import jax
import numpy as np
import pytest

from fixbin_jax.config import Config, MeshConfig
from fixbin_jax.errors import UserError
from fixbin_jax.sharding import check_divisible, make_placement
from fixbin_jax.step import Step
from tests import tiny

MESHES = [(d, f, 8 // d // f) for d in (1, 2, 4, 8) for f in (1, 2, 4, 8) if d * f <= 8]
LEARNED = tiny.change(tiny.CONFIG, model={"input": tiny.INPUTS["learned"], "head_bias": True})


@functools.cache
def result(config: Config, mesh: tuple[int, int, int]):  # type: ignore[no-untyped-def]
    """Initial parameters, loss sum, gradients, and the state after an update, on a mesh."""
    place = tiny.placement(*mesh)
    step = Step(config, place)
    state = step.init(0)
    batch = place.put_batch(tiny.batch(config))
    loss, gradients = jax.jit(step._gradients)(state.params, batch)
    initial = jax.tree.map(np.array, state.params)
    state, metrics = step.update(state, batch)
    return initial, float(loss), gradients, state, metrics


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_computes_what_one_device_does(mesh: tuple[int, int, int]) -> None:
    initial, loss, gradients, _, metrics = result(LEARNED, (1, 1, 1))
    other_initial, other_loss, other_gradients, state, other_metrics = result(LEARNED, mesh)
    for name, value in tiny.leaves(initial).items():
        np.testing.assert_array_equal(value, tiny.leaves(other_initial)[name], err_msg=name)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    assert tiny.largest_difference(gradients, other_gradients) < 1e-5
    for name in metrics:
        assert float(other_metrics[name]) == pytest.approx(float(metrics[name]), rel=1e-5)
    # Each device holds its part and no more.
    for logical, array in (("heads", "layers.attention.query"), ("mlp", "layers.mlp.up")):
        weight = tiny.leaves(state.params)[f"{array}.weight"]
        place = tiny.placement(*mesh)
        share = weight.size // place.parts(logical) // place.parts("width")
        assert {shard.data.size for shard in weight.addressable_shards} == {share}
    moments = [x for x in jax.tree.leaves(state.optimizer) if x.ndim]
    params = jax.tree.leaves(state.params)
    assert [m.sharding for m in moments] == [p.sharding for p in params] * 2


def test_initial_parameters_are_never_whole_on_one_device() -> None:
    step = Step(tiny.change(tiny.CONFIG, model={"vocab_size": 32_768}), tiny.placement(1, 8, 1))
    lowered = jax.jit(step.structure._draw, out_shardings=step.structure.shardings).lower(0)
    memory = lowered.compile().memory_analysis()
    whole = sum(x.size * 4 for x in jax.tree.leaves(step.structure.shapes))
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < whole / 2


def test_one_axis_takes_the_devices_that_are_left() -> None:
    assert make_placement(MeshConfig(2, -1, 2)).mesh.shape == {"data": 2, "fsdp": 2, "tensor": 2}
    assert make_placement(MeshConfig()).mesh.shape == {"data": 1, "fsdp": 8, "tensor": 1}


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ((-1, -1, 1), "data and fsdp are both -1"),
        ((3, -1, 1), "data=3 x fsdp=-1 x tensor=1 does not fit 8 devices: 3 does not divide 8"),
        ((2, 2, 1), "does not fit 8 devices: 4 is not 8"),
        ((16, 1, 1), "does not fit 8 devices"),
        ((0, -1, 1), "config.mesh.data: 0"),
        ((1, 1, -2), "config.mesh.tensor: -2"),
    ],
)
def test_meshes_that_are_none_are_refused(mesh: tuple[int, int, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_placement(MeshConfig(*mesh))


@pytest.mark.parametrize(
    ("mesh", "change", "words"),
    [
        ((8, 1, 1), {"train": {"batch_size": 12}}, "batch_size.*12 is not divisible.*data=8"),
        (
            (4, 1, 1),
            {"train": {"batch_size": 8, "micro_batches": 4}},
            "micro_batches: 2 is not divisible",
        ),
        ((1, 1, 8), {"model": {"num_heads": 4}}, "num_heads: 4 .* tensor=8"),
        ((1, 1, 8), {"model": {"vocab_size": 300}}, "vocab_size: 300 .* tensor=8"),
        ((1, 1, 8), {"model": {"mlp_width": 100}}, "mlp_width: 100 .* tensor=8"),
        ((1, 8, 1), {"model": {"width": 36, "num_heads": 2}}, "width: 36 .* fsdp=8"),
    ],
)
def test_sizes_the_mesh_does_not_divide_are_refused(mesh, change, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=words):
        check_divisible(tiny.change(tiny.CONFIG, **change), tiny.placement(*mesh))
