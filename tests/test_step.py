import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fixbin_jax.config import Config
from fixbin_jax.step import Step
from tests import tiny

MASKED = tiny.batch(tiny.CONFIG)


def loss_and_gradients(config: Config, batch=MASKED):  # type: ignore[no-untyped-def]
    place = tiny.placement()
    step = Step(config, place)
    return jax.jit(step._gradients)(step.init(0).params, place.put_batch(batch))


@pytest.mark.parametrize(
    "change",
    [
        {"compute": {"remat": "dots"}},
        {"compute": {"remat": "full"}},
        {"compute": {"scan_layers": False}},
        {"compute": {"scan_layers": False, "remat": "full"}},
        {"compute": {"loss_rows": 10_000}},
        {"compute": {"loss_rows": 1}},
        {"train": {"micro_batches": 4}},
        {"train": {"micro_batches": 16}},
    ],
)
def test_how_it_is_computed_changes_neither_loss_nor_gradients(change) -> None:  # type: ignore[no-untyped-def]
    loss, gradients = loss_and_gradients(tiny.CONFIG)
    other_loss, other_gradients = loss_and_gradients(tiny.change(tiny.CONFIG, **change))
    assert float(other_loss) == pytest.approx(float(loss), rel=1e-6)
    assert tiny.largest_difference(gradients, other_gradients) < 1e-5


def test_loss_and_gradients_equal_those_of_all_logits() -> None:
    step = Step(tiny.CONFIG, tiny.placement())
    params = step.init(0).params

    def dense(params):  # type: ignore[no-untyped-def]
        logits = step.structure.decoder(params)(MASKED["ids"])
        log_p = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(log_p, MASKED["targets"][..., None], axis=-1)[..., 0]
        return -(picked * MASKED["mask"]).sum()

    expected, expected_gradients = jax.jit(jax.value_and_grad(dense))(params)
    loss, gradients = loss_and_gradients(tiny.CONFIG)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert tiny.largest_difference(gradients, expected_gradients) < 1e-5


def test_the_loss_is_the_mean_over_counted_targets_of_all_micro_batches() -> None:
    config = tiny.change(tiny.CONFIG, train={"micro_batches": 4})
    place = tiny.placement(2, 2, 2)
    step = Step(config, place)
    state = step.init(0)
    loss_sum, _ = loss_and_gradients(tiny.CONFIG)
    _, metrics = step.update(state, place.put_batch(MASKED))
    assert float(metrics["loss"]) == pytest.approx(float(loss_sum) / MASKED["mask"].sum(), rel=1e-6)


def test_evaluation_counts_every_target_once_and_agrees_with_training() -> None:
    place = tiny.placement(2, 2, 2)
    step = Step(tiny.CONFIG, place)
    state = step.init(0)
    loss_sum, targets = step.evaluate(state.params, place.put_batch(MASKED))
    expected, _ = loss_and_gradients(tiny.CONFIG)
    assert int(targets) == MASKED["mask"].sum()
    assert float(loss_sum) == pytest.approx(float(expected), rel=1e-6)


def test_a_batch_in_which_nothing_counts_leaves_finite_numbers() -> None:
    place = tiny.placement()
    step = Step(tiny.CONFIG, place)
    nothing = {**MASKED, "mask": np.zeros_like(MASKED["mask"])}
    state, metrics = step.update(step.init(0), place.put_batch(nothing))
    assert float(metrics["loss"]) == 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_updates_are_compiled_once_and_take_the_old_state_s_memory() -> None:
    place = tiny.placement(1, 4, 2)
    step = Step(tiny.CONFIG, place)
    state = step.init(0)
    for seed in range(3):
        before = state
        state, _ = step.update(state, place.put_batch(tiny.batch(tiny.CONFIG, seed)))
        assert all(x.is_deleted() for x in jax.tree.leaves(before))
    assert step.update._cache_size() == 1
    assert int(state.step) == 3


def test_a_start_from_weights_alone_begins_the_schedule() -> None:
    step = Step(tiny.CONFIG, tiny.placement())
    state = step.start_from(step.init(5).params)
    assert int(state.step) == 0
    assert all(not np.any(x) for x in jax.tree.leaves(state.optimizer))


def test_what_a_seed_draws_is_the_seed_s_alone() -> None:
    step = Step(tiny.CONFIG, tiny.placement())
    one, again, other = (tiny.leaves(step.init(seed).params) for seed in (1, 1, 2))
    for name, value in one.items():
        np.testing.assert_array_equal(value, again[name])
        if value.std() > 0:
            assert not np.array_equal(value, other[name]), name
    # No two layers, and no two matrices of a layer, begin alike.
    weights = [w for n, v in one.items() if n.startswith("layers") and v.ndim == 3 for w in v]
    assert len({w.tobytes() for w in weights}) == len(weights)
    # Uniform: the kurtosis is 9 / 5.
    head = one["head.weight"] / tiny.MODEL.init_std
    assert head.mean() == pytest.approx(0, abs=0.03)
    assert head.std() == pytest.approx(1, abs=0.02)
    assert (head**4).mean() / (head**2).mean() ** 2 == pytest.approx(1.8, abs=0.05)
    # Residual projections are narrower by sqrt(2 x layers).
    std = dataclasses.asdict(tiny.MODEL)["init_std"]
    assert one["layers.mlp.up.weight"].std() == pytest.approx(std, rel=0.05)
    assert one["layers.mlp.down.weight"].std() == pytest.approx(std / 2, rel=0.05)
