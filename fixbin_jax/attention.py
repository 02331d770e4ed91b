"""Causal attention and rotary positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fixbin_jax.sharding import Placement

# Query rows whose scores exist at one time, and heads worked on together: what stays in a CPU
# core's cache. Longer sequences take longer blocks, so that the unrolled program stays small.
_BLOCK_ROWS = 128
_MOST_BLOCKS = 16
_HEADS_AT_ONCE = 4
_MASKED = -1e30


def rotate(x_BxLxHxd: jax.Array, positions_BxL: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding, rotate-half form (Su et al. 2021, arXiv 2104.09864).

    Component i of the first half is paired with component i of the second and turned by the angle
    position * theta ** (-2 i / d). Angles are computed in float32; the result has x's dtype.
    """
    half = x_BxLxHxd.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions_BxL.astype(jnp.float32)[:, :, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = x_BxLxHxd[..., :half].astype(jnp.float32), x_BxLxHxd[..., half:].astype(jnp.float32)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x_BxLxHxd.dtype)


def masked_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask_BxLxS: jax.Array) -> jax.Array:
    """softmax(q k^T / sqrt(d)) v over the keys a mask allows; for inference.

    Args:
      q: [B, L, H, d] queries.
      k, v: [B, S, H, d] keys and values.
      mask_BxLxS: bool, whether query l may see key s. A query that sees none gets the mean of v.

    Returns:
      [B, L, H, d], q's dtype. Scores and softmax are float32.
    """
    scores = jnp.einsum("blhd,bshd->bhls", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask_BxLxS[:, None], scores * q.shape[-1] ** -0.5, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bhls,bshd->blhd", weights, v)


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, place: Placement) -> jax.Array:
    """softmax(q k^T / sqrt(d)) v where position l sees positions up to l; for training.

    The backward pass keeps (q, k, v, output, log-sum-exp) and recomputes the scores by blocks, as
    in FlashAttention (Dao et al. 2022, arXiv 2205.14135), so that no [L, L] array is stored.

    Args:
      q, k, v: [B, L, H, d], any L.
      place: each device attends to its own sequences and heads.

    Returns:
      [B, L, H, d], q's dtype. Softmax is float32.
    """
    axes = ("batch", None, "heads", None)
    return place.per_shard(_attend, (axes, axes, axes), axes)(q, k, v)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    B, L, H, d = q.shape

    def fold(x: jax.Array) -> jax.Array:
        return x.transpose(0, 2, 1, 3).reshape(B * H, L, d)

    out = _attend_heads(fold(q * jnp.asarray(d**-0.5, q.dtype)), fold(k), fold(v))
    return out.reshape(B, H, L, d).transpose(0, 2, 1, 3)


@jax.custom_vjp
def _attend_heads(q_NxLxd: jax.Array, k_NxLxd: jax.Array, v_NxLxd: jax.Array) -> jax.Array:
    return _attend_forward(q_NxLxd, k_NxLxd, v_NxLxd)[0]


def _attend_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple]:
    out, lse = lax.map(lambda qkv: _forward_one(*qkv), (q, k, v), batch_size=_HEADS_AT_ONCE)
    return out, (q, k, v, out, lse)


def _attend_backward(residuals: tuple, d_out: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return lax.map(lambda r: _backward_one(*r), (*residuals, d_out), batch_size=_HEADS_AT_ONCE)


_attend_heads.defvjp(_attend_forward, _attend_backward)

_dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)


def _blocks(length: int) -> list[tuple[int, int]]:
    rows = max(_BLOCK_ROWS, -(-length // _MOST_BLOCKS))
    return [(start, min(start + rows, length)) for start in range(0, length, rows)]


def _visible(start: int, end: int) -> np.ndarray:
    """Bool [end - start, end]: which of the keys before `end` each query row sees."""
    return np.tril(np.ones((end - start, end), bool), start)


def _forward_one(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One head: output [L, d] and log-sum-exp [L, 1] (float32) of scaled queries."""
    outs, lses = [], []
    for start, end in _blocks(q.shape[0]):
        scores = jnp.where(_visible(start, end), _dot(q[start:end], k[:end].T), _MASKED)
        top = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        outs.append((_dot(weights.astype(v.dtype), v[:end]) / total).astype(v.dtype))
        lses.append(top + jnp.log(total))
    return jnp.concatenate(outs), jnp.concatenate(lses)


def _backward_one(
    q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, lse: jax.Array, d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One head's gradients [L, d]: with P the weights, dS = P * (dO V^T - rowsum(dO * O))."""
    along = (d_out.astype(jnp.float32) * out).sum(axis=-1, keepdims=True)
    blocks = _blocks(q.shape[0])
    dq = []
    dk = [jnp.zeros((e - s, q.shape[1]), jnp.float32) for s, e in blocks]
    dv = [jnp.zeros((e - s, q.shape[1]), jnp.float32) for s, e in blocks]
    for start, end in blocks:
        scores = _dot(q[start:end], k[:end].T)
        weights = jnp.where(_visible(start, end), jnp.exp(scores - lse[start:end]), 0.0)
        d_scores = weights * (_dot(d_out[start:end], v[:end].T) - along[start:end])
        d_scores = d_scores.astype(q.dtype)
        dq.append(_dot(d_scores, k[:end]))
        block_dv = _dot(weights.astype(q.dtype).T, d_out[start:end])
        block_dk = _dot(d_scores.T, q[start:end])
        for i, (s, e) in enumerate(blocks):
            if e <= end:
                dv[i] += block_dv[s:e]
                dk[i] += block_dk[s:e]
    return tuple(jnp.concatenate(x).astype(q.dtype) for x in (dq, dk, dv))  # type: ignore[return-value]
