import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fixbin_jax.loss import cross_entropy_sum
from tests import tiny

PLACE = tiny.placement()


def problem(n: int, vocab_size: int, width: int = 6, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, width)).astype(np.float32)
    head = 2 * rng.standard_normal((vocab_size, width)).astype(np.float32)
    bias = rng.standard_normal(vocab_size).astype(np.float32)
    return x, head, bias, rng.integers(0, vocab_size, n, np.int32), rng.random(n) < 0.6


def dense_float64(x, head, bias, targets, mask):  # type: ignore[no-untyped-def]
    """The loss and its gradients in x, head and bias, written from the formula."""
    x, head, bias = (a.astype(np.float64) for a in (x, head, bias))
    logits = x @ head.T + bias
    logits -= logits.max(axis=1, keepdims=True)
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    rows = np.arange(len(x))
    loss = -np.log(p[rows, targets]) @ mask
    p[rows, targets] -= 1
    p *= mask[:, None]
    return loss, (p @ head, p.T @ x, p.sum(axis=0))


# One row; chunks that divide, that do not, that are all of it, that are more than all of it.
@pytest.mark.parametrize(
    ("n", "vocab_size", "rows"), [(1, 2, 1), (12, 13, 4), (7, 11, 3), (9, 50, 9), (5, 17, 50)]
)
def test_chunked_loss_and_gradients_equal_the_formula(n: int, vocab_size: int, rows: int) -> None:
    given_ = problem(n, vocab_size, seed=n)
    loss, gradients = jax.value_and_grad(cross_entropy_sum, (0, 1, 2))(*given_, rows, PLACE)
    expected, expected_gradients = dense_float64(*given_)
    assert loss == pytest.approx(expected, rel=1e-6, abs=1e-5)
    assert cross_entropy_sum(*given_, rows, PLACE) == pytest.approx(expected, rel=1e-6, abs=1e-5)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * max(1, np.abs(theirs).max()))


def test_the_gradient_follows_what_the_loss_is_multiplied_by() -> None:
    given_ = problem(10, 20)
    once, thrice = (
        jax.grad(lambda x, k=k: k * cross_entropy_sum(x, *given_[1:], 4, PLACE))(given_[0])
        for k in (1.0, 3.0)
    )
    np.testing.assert_allclose(3 * once, thrice, rtol=1e-6)


def test_a_target_that_does_not_count_changes_nothing() -> None:
    x, head, bias, targets, mask = problem(12, 20)
    other_x, other_targets = x.copy(), targets.copy()
    other_x[~mask] = 1e3
    other_targets[~mask] = 0
    f = jax.value_and_grad(cross_entropy_sum, (0, 1, 2))
    loss, gradients = f(x, head, bias, targets, mask, 5, PLACE)
    same, same_gradients = f(other_x, head, bias, other_targets, mask, 5, PLACE)
    assert loss == same
    for a, b in zip(gradients, same_gradients, strict=True):
        np.testing.assert_array_equal(a, b)
    nothing, zeros = f(x, head, bias, targets, np.zeros(12, bool), 5, PLACE)
    assert nothing == 0
    assert all(not np.any(z) for z in zeros)


def test_huge_logits_stay_finite() -> None:
    x, head, bias, targets, mask = problem(12, 20)
    f = jax.value_and_grad(cross_entropy_sum, (0, 1, 2))
    loss, gradients = f(1e4 * x, head, bias, targets, mask, 5, PLACE)
    assert np.isfinite(loss)
    assert all(np.isfinite(g).all() for g in gradients)


def test_bfloat16_activations_do_not_quantise_the_loss() -> None:
    x, head, bias, targets, mask = problem(64, 5000, width=32)
    x16, head16 = jnp.bfloat16(x), jnp.bfloat16(head)
    exact = (np.float32(x16), np.float32(head16), bias, targets, mask)
    expected, (dx, dhead, _) = dense_float64(*exact)
    f = jax.value_and_grad(cross_entropy_sum, (0, 1))
    loss, gradients = f(x16, np.float32(head16), bias, targets, mask, 16, PLACE)
    # Logits of 20 in bfloat16 would be known to 0.06 each.
    assert loss == pytest.approx(expected, rel=1e-6)
    assert gradients[0].dtype == jnp.bfloat16
    assert gradients[1].dtype == np.float32
    for ours, theirs in zip(gradients, (dx, dhead), strict=True):
        assert np.abs(np.float32(ours) - theirs).max() < 1e-2 * np.abs(theirs).max()


def test_memory_is_under_a_quarter_of_the_dense_loss() -> None:
    n, vocab_size, width = 8 * 512, 65_536, 64
    shapes = (
        jax.ShapeDtypeStruct((n, width), jnp.float32),
        jax.ShapeDtypeStruct((vocab_size, width), jnp.float32),
        jax.ShapeDtypeStruct((n,), jnp.int32),
        jax.ShapeDtypeStruct((n,), bool),
    )

    def dense(x: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        logits = x @ head.T
        picked = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        return jnp.where(mask, jax.nn.logsumexp(logits, axis=1) - picked, 0).sum()

    def chunked(x: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        return cross_entropy_sum(x, head, None, targets, mask, 256, PLACE)

    ours, theirs = (
        jax.jit(jax.grad(f, (0, 1))).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
        for f in (chunked, dense)
    )
    assert ours < theirs / 4
