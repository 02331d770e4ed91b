import math

import jax
import numpy as np
import optax
import pytest

from fixbin_jax.config import ComputeConfig, InputConfig, OptimizerConfig
from fixbin_jax.model import Structure
from fixbin_jax.optimizer import learning_rate, make_optimizer
from tests import tiny


def test_learning_rate_equals_the_formula() -> None:
    config = OptimizerConfig(learning_rate=0.5, warmup_steps=10, final_fraction=0.2)
    schedule = learning_rate(config, 110)
    for step in (0, 3, 10, 11, 60, 110, 500):
        if step < 10:
            expected = 0.5 * step / 10
        else:
            share = min(step - 10, 100) / 100
            expected = 0.5 * (0.2 + 0.8 * (1 + math.cos(math.pi * share)) / 2)
        assert float(schedule(step)) == pytest.approx(expected, rel=1e-6), step


@pytest.mark.parametrize(("warmup_steps", "num_steps"), [(0, 1), (0, 10), (10, 10), (100, 10)])
def test_a_run_shorter_than_its_warmup_has_a_learning_rate(warmup_steps, num_steps) -> None:  # type: ignore[no-untyped-def]
    schedule = learning_rate(OptimizerConfig(warmup_steps=warmup_steps), num_steps)
    rates = np.array([schedule(step) for step in range(num_steps + 1)])
    assert np.isfinite(rates).all()
    assert rates.max() <= 3e-4 * (1 + 1e-6)
    if not warmup_steps:
        assert rates[0] == pytest.approx(3e-4)


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
def test_updates_equal_torch_adamw(clip_norm: float) -> None:
    torch = pytest.importorskip("torch")
    config = OptimizerConfig(
        learning_rate=0.1, warmup_steps=0, final_fraction=1, weight_decay=0.3, clip_norm=clip_norm
    )
    rng = np.random.default_rng(0)
    params = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("w", (3, 5)), ("b", 4))}
    tx = make_optimizer(config, 10, {"w": ("mlp", "width"), "b": ("mlp",)})
    state = tx.init(params)
    theirs = {n: torch.nn.Parameter(torch.tensor(x)) for n, x in params.items()}
    groups = [
        {"params": [theirs["w"]], "weight_decay": 0.3},
        {"params": [theirs["b"]], "weight_decay": 0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.1, betas=(config.beta1, config.beta2), eps=config.eps)
    for _ in range(6):
        gradients = {n: rng.standard_normal(x.shape).astype(np.float32) for n, x in params.items()}
        updates, state = tx.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        for name, parameter in theirs.items():
            parameter.grad = torch.tensor(gradients[name])
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(theirs.values(), clip_norm)
        adamw.step()
    for name, parameter in theirs.items():
        np.testing.assert_allclose(params[name], parameter.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_matrices_decay_and_vectors_do_not() -> None:
    model = tiny.change(tiny.CONFIG, model={"head_bias": True, "input": InputConfig("learned")})
    structure = Structure(model.model, ComputeConfig(), tiny.placement())
    params = tiny.randomised(structure.init(0))
    tx = make_optimizer(OptimizerConfig(warmup_steps=0, weight_decay=1.0), 10, structure.axes)
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _ = tx.update(zeros, tx.init(params), params)
    decayed = {name for name, update in tiny.leaves(updates).items() if np.any(update)}
    assert decayed == {
        "input.table",
        "head.weight",
        *(f"layers.attention.{n}.weight" for n in ("query", "key", "value", "out")),
        *(f"layers.mlp.{n}.weight" for n in ("up", "down")),
    }
