import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fixbin_jax.attention import causal_attention, masked_attention, rotate
from tests import tiny


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """softmax(q k^T / sqrt(d)) v in float64, one query at a time."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for b, i, h in np.ndindex(q.shape[:3]):
        keys = np.flatnonzero(mask[b, i])
        scores = k[b, keys, h] @ q[b, i, h] / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        out[b, i, h] = weights @ v[b, keys, h] / weights.sum()
    return out


def qkv(length: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [2 * rng.standard_normal((2, length, 3, 10), np.float32) for _ in range(3)]


# One block, exactly two, three of which the last is short, and more than the most blocks of 128.
@pytest.mark.parametrize("length", [1, 5, 128, 256, 300, 2100])
def test_causal_attention_and_its_gradients_equal_the_formula(length: int) -> None:
    q, k, v = qkv(length)
    place = tiny.placement()

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("blhd,bshd->bhls", q, k) / np.sqrt(q.shape[-1])
        scores = jnp.where(np.tril(np.ones((length, length), bool)), scores, -jnp.inf)
        return jnp.einsum("bhls,bshd->blhd", jax.nn.softmax(scores), v)

    weights = np.cos(np.arange(q.size)).reshape(q.shape)

    def out_and_gradients(f):  # type: ignore[no-untyped-def]
        return jax.jit(jax.value_and_grad(lambda *x: (f(*x) * weights).sum(), (0, 1, 2)))(q, k, v)

    out, gradients = out_and_gradients(lambda *x: causal_attention(*x, place))
    expected_out, expected = out_and_gradients(plain)
    assert abs(out - expected_out) < 1e-3
    for ours, theirs in zip(gradients, expected, strict=True):
        assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
    if length <= 300:
        mask = np.broadcast_to(np.tril(np.ones((length, length), bool)), (2, length, length))
        found = jax.jit(lambda *x: causal_attention(*x, place))(q, k, v)
        np.testing.assert_allclose(found, reference(q, k, v, mask), atol=1e-5)


def test_masked_attention_equals_the_formula() -> None:
    q, k, v = qkv(20)
    mask = np.random.default_rng(1).random((2, 20, 20)) < 0.3
    mask[:, :, 4] = True
    np.testing.assert_allclose(masked_attention(q, k, v, mask), reference(q, k, v, mask), atol=1e-5)


def test_no_weights_between_all_pairs_of_positions_are_kept() -> None:
    B, L, H = 8, 512, 8
    x = jax.ShapeDtypeStruct((B, L, H, 8), jnp.float32)
    place = tiny.placement()
    gradient = jax.jit(jax.grad(lambda *x: causal_attention(*x, place).sum(), (0, 1, 2)))
    memory = gradient.lower(x, x, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < B * H * L * L * 4 / 2


def test_rotation_equals_the_complex_product() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 7, 3, 10)).astype(np.float32)
    positions = rng.integers(0, 1000, (2, 7))
    frequencies = 10_000.0 ** (-np.arange(5) / 5)
    turn = np.exp(1j * positions[..., None, None] * frequencies)
    turned = (x[..., :5] + 1j * x[..., 5:]) * turn
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    # An angle of up to 1,000 in float32 is known to 6e-5.
    np.testing.assert_allclose(rotate(x, positions, 10_000.0), expected, atol=3e-4)


def test_rotated_scores_depend_on_the_distance_alone() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 1, 16)).astype(np.float32)

    def score(i: int, j: int) -> float:
        at = [rotate(x, np.array([[p]]), 10_000.0) for x, p in ((q, i), (k, j))]
        return float((at[0] * at[1]).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert abs(score(9, 4) - score(4, 9)) > 1e-2
