"""The decoder: an input interface, pre-LayerNorm blocks with rotary positions, a separate head.

Weights are stored [out, in], one array for all layers where a name stands once in each layer.
Activations go through matrix products as [batch * positions, width].
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fixbin_jax import attention
from fixbin_jax.codes import encode
from fixbin_jax.config import ComputeConfig, ModelConfig
from fixbin_jax.sharding import Placement

# Parameters as nested dicts of arrays, named as the modules below name them.
Params = dict[str, Any]
# Queries, keys and values [B, L, H, d] -> the attention's output [B, L, H, d], and anything else
# that a caller wants collected from every layer.
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]

_REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def _parameter(value: jax.Array, *axes: str | None) -> nnx.Param:
    # Placement is decided where a mesh is known, so the axes are only noted here.
    return nnx.Param(value, out_sharding=axes, eager_sharding=False)


def _uniform(key: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
    """float32 values uniform about 0 with this standard deviation, of 2^24 levels.

    Integers and one rounding give the same bits on every mesh and device. A normal distribution's
    inverse error function does not: how its products and sums are contracted is the compiler's.
    """
    levels = 2**24
    drawn = (jax.random.bits(key, shape, jnp.uint32) >> 8).astype(jnp.int32)
    doubled = 2 * drawn - (levels - 1)  # odd integers, whose variance is (levels^2 - 1) / 3
    return doubled.astype(jnp.float32) * (std / ((levels**2 - 1) / 3) ** 0.5)


class Linear(nnx.Module):
    """y = x W^T + b, computed in x's dtype, W being float32 [out, in]."""

    def __init__(
        self, shape: tuple[int, int], axes: tuple[str, str], bias: bool, std: float, rngs: nnx.Rngs
    ) -> None:
        self.weight = _parameter(_uniform(rngs.params(), shape, std), *axes)
        # A bias added to the residual stream is whole on every device.
        bias_axis = None if axes[0] == "width" else axes[0]
        self.bias = _parameter(jnp.zeros(shape[0], jnp.float32), bias_axis) if bias else None

    def __call__(self, x_NxI: jax.Array) -> jax.Array:
        """[N, in] -> [N, out]."""
        y_NxO = lax.dot_general(
            x_NxI, self.weight[...].astype(x_NxI.dtype), (((1,), (1,)), ((), ()))
        )
        return y_NxO if self.bias is None else y_NxO + self.bias[...].astype(x_NxI.dtype)


class LayerNorm(nnx.Module):
    """Layer normalisation over the width, in float32; the result has x's dtype."""

    def __init__(self, config: ModelConfig) -> None:
        self.eps = config.norm_eps
        self.weight = _parameter(jnp.ones(config.width, jnp.float32), None)
        zeros = jnp.zeros(config.width, jnp.float32)
        self.bias = _parameter(zeros, None) if config.norm_bias else None

    def __call__(self, x_NxD: jax.Array) -> jax.Array:
        """[N, width] -> [N, width]."""
        x = x_NxD.astype(jnp.float32)
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = jnp.square(centred).mean(axis=-1, keepdims=True)
        y = centred * lax.rsqrt(variance + self.eps) * self.weight[...]
        return (y if self.bias is None else y + self.bias[...]).astype(x_NxD.dtype)


class InputInterface(nnx.Module):
    """Ids to vectors of the model's width: a trained table, or a code with no parameters."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.code = config.code
        self.width = config.width
        table: nnx.Param | None = None
        if self.code is None:
            # A stream of its own: the other weights of a seed are the same for all interfaces.
            shape = (config.vocab_size, config.width)
            drawn = _uniform(rngs.input(), shape, config.init_std)
            table = _parameter(drawn, "input_vocab", "width")
        self.table = table

    def __call__(self, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """[...] int ids -> [..., width]."""
        if self.code is not None:
            return encode(self.code, ids, self.width, dtype)
        assert self.table is not None
        return self.table[...][ids].astype(dtype)


class Attention(nnx.Module):
    """Multi-head self-attention with rotary positions; kernels [heads * head_width, width]."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        square, bias, std = (config.width, config.width), config.linear_bias, config.init_std
        self.query = Linear(square, ("heads", "width"), bias, std, rngs)
        self.key = Linear(square, ("heads", "width"), bias, std, rngs)
        self.value = Linear(square, ("heads", "width"), bias, std, rngs)
        self.out = Linear(square, ("width", "heads"), bias, _residual_std(config), rngs)

    def __call__(
        self, x_NxD: jax.Array, positions_BxL: jax.Array, attend: Attend
    ) -> tuple[jax.Array, Any]:
        """[B * L, width] -> [B * L, width], and what `attend` returned beside its output."""
        shape = (*positions_BxL.shape, self.config.num_heads, self.config.head_width)
        q = attention.rotate(
            self.query(x_NxD).reshape(shape), positions_BxL, self.config.rope_theta
        )
        k = attention.rotate(self.key(x_NxD).reshape(shape), positions_BxL, self.config.rope_theta)
        out, extra = attend(q, k, self.value(x_NxD).reshape(shape))
        return self.out(out.reshape(x_NxD.shape)), extra


class MLP(nnx.Module):
    """width -> hidden width, GELU, -> width."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        width, hidden, bias = config.width, config.hidden_width, config.linear_bias
        self.approximate = config.gelu == "tanh"
        self.up = Linear((hidden, width), ("mlp", "width"), bias, config.init_std, rngs)
        self.down = Linear((width, hidden), ("width", "mlp"), bias, _residual_std(config), rngs)

    def __call__(self, x_NxD: jax.Array) -> jax.Array:
        """[N, width] -> [N, width]."""
        return self.down(jax.nn.gelu(self.up(x_NxD), approximate=self.approximate))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = LayerNorm(config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = LayerNorm(config)
        self.mlp = MLP(config, rngs)

    def __call__(
        self, x_NxD: jax.Array, positions_BxL: jax.Array, attend: Attend
    ) -> tuple[jax.Array, Any]:
        """[B * L, width] -> [B * L, width], and what `attend` returned beside its output."""
        y, extra = self.attention(self.attention_norm(x_NxD), positions_BxL, attend)
        x_NxD = x_NxD + y
        return x_NxD + self.mlp(self.mlp_norm(x_NxD)), extra


class Decoder(nnx.Module):
    """A decoder-only Transformer over ids.

    Call it with ids for logits; `hidden` stops before the head, for a loss that never holds all
    logits.
    """

    def __init__(
        self, config: ModelConfig, compute: ComputeConfig, place: Placement, rngs: nnx.Rngs
    ) -> None:
        self.config, self.compute, self.place = config, compute, place
        self.input = InputInterface(config, rngs)
        stack = nnx.vmap(
            lambda layer_rngs: Block(config, layer_rngs),
            transform_metadata={nnx.PARTITION_NAME: "layer"},
        )
        self.layers = nnx.split_rngs(splits=config.num_layers)(stack)(rngs)
        self.norm = LayerNorm(config)
        head = (config.vocab_size, config.width)
        self.head = Linear(head, ("vocab", "width"), config.head_bias, config.init_std, rngs)

    def __call__(self, ids_BxL: jax.Array) -> jax.Array:
        """Logits [B, L, V], float32, of the id that follows each position."""
        x_NxD = self.hidden(ids_BxL)
        return self.logits(x_NxD).reshape(*ids_BxL.shape, self.config.vocab_size)

    def hidden(self, ids_BxL: jax.Array) -> jax.Array:
        """What the head sees at each position of sequences that start at position 0.

        Returns:
          [B * L, width], compute dtype.
        """
        positions = jnp.broadcast_to(jnp.arange(ids_BxL.shape[1]), ids_BxL.shape)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
            return attention.causal_attention(q, k, v, self.place), None

        return self.apply_layers(ids_BxL, positions, lambda _: attend, None)[0]

    def logits(self, x_NxD: jax.Array) -> jax.Array:
        """float32 logits [N, V] of what `hidden` returns."""
        y = lax.dot_general(
            x_NxD,
            self.head.weight[...].astype(x_NxD.dtype),
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return y if self.head.bias is None else y + self.head.bias[...]

    def apply_layers(
        self,
        ids_BxL: jax.Array,
        positions_BxL: jax.Array,
        attend_of_layer: Callable[[Any], Attend],
        per_layer: Any,
    ) -> tuple[jax.Array, Any]:
        """Ids through the input interface, every block and the final norm.

        Args:
          ids_BxL: int ids.
          positions_BxL: int position of each id in its sequence.
          attend_of_layer: a layer's part of `per_layer` -> how that layer attends.
          per_layer: arrays with a leading axis of num_layers, or None.

        Returns:
          [B * L, width], and what the layers' `attend` returned beside their output, stacked.
        """
        dtype = jnp.dtype(self.compute.dtype)
        rows = ("batch", None)
        x_NxD = self.place.constrain(self.input(ids_BxL.reshape(-1), dtype), rows)
        block, weights = nnx.split(self.layers)

        def layer(x_NxD: jax.Array, part: tuple[Any, Any]) -> tuple[jax.Array, Any]:
            layer_weights, layer_part = part
            attend = attend_of_layer(layer_part)
            x_NxD, extra = nnx.merge(block, layer_weights)(x_NxD, positions_BxL, attend)
            return self.place.constrain(x_NxD, rows), extra

        if self.compute.remat != "none":
            policy = _REMAT_POLICIES[self.compute.remat]
            layer = jax.checkpoint(layer, policy=policy, prevent_cse=not self.compute.scan_layers)
        over_layers = lax.scan if self.compute.scan_layers else _unrolled
        x_NxD, extras = over_layers(layer, x_NxD, (nnx.as_pure(weights), per_layer))
        return self.norm(x_NxD), extras


def _unrolled(f: Callable, carry: jax.Array, xs: Any) -> tuple[jax.Array, Any]:
    """What lax.scan does, one copy of f a step."""
    leaves, tree = jax.tree.flatten(xs)
    length = leaves[0].shape[0]
    # lax.split's transpose is one concatenation; slices would each add into a full-size gradient.
    parts = [lax.split(leaf, (1,) * length) for leaf in leaves]
    ys = []
    for i in range(length):
        carry, y = f(carry, jax.tree.unflatten(tree, [part[i][0] for part in parts]))
        ys.append(y)
    return carry, jax.tree.map(lambda *y: jnp.stack(y), *ys)


def _residual_std(config: ModelConfig) -> float:
    """GPT-2's scaling: the residual stream's variance does not grow with the number of layers."""
    return config.init_std / (2 * config.num_layers) ** 0.5


def _build(config: ModelConfig, compute: ComputeConfig, place: Placement, seed: Any) -> Decoder:
    key = jax.random.key(seed)
    return Decoder(config, compute, place, nnx.Rngs(params=key, input=jax.random.fold_in(key, 1)))


class Structure:
    """A decoder without its parameters: what they are called, their shapes, where they lie.

    Attributes:
      shapes: Params of jax.ShapeDtypeStruct, each with its sharding.
      axes: Params of tuples, the logical axes of each array.
    """

    def __init__(self, config: ModelConfig, compute: ComputeConfig, place: Placement) -> None:
        self.config, self.compute, self.place = config, compute, place
        self._graph, state = nnx.split(nnx.eval_shape(lambda: _build(config, compute, place, 0)))
        variables = dict(nnx.to_flat_state(state))
        self.axes: Params = nnx.traversals.unflatten_mapping(
            {path: variable.get_metadata("out_sharding") for path, variable in variables.items()}
        )
        self.shapes: Params = nnx.traversals.unflatten_mapping(
            {
                path: jax.ShapeDtypeStruct(
                    variable.shape,
                    variable.dtype,
                    sharding=place.sharding(variable.get_metadata("out_sharding")),
                )
                for path, variable in variables.items()
            }
        )

    def decoder(self, params: Params) -> Decoder:
        """The module with these parameters."""
        return nnx.merge(self._graph, params)

    @property
    def shardings(self) -> Params:
        """Where each array lies."""
        return jax.tree.map(lambda shape: shape.sharding, self.shapes)

    def init(self, seed: int) -> Params:
        """Parameters drawn from a seed: the same ones, bit for bit, on any mesh.

        Every device draws its own part; none ever holds the whole.
        """
        return jax.jit(self._draw, out_shardings=self.shardings)(seed)

    def _draw(self, seed: jax.Array) -> Params:
        model = _build(self.config, self.compute, self.place, seed)
        return nnx.to_pure_dict(nnx.split(model)[1])

    def count(self) -> tuple[int, int]:
        """Number of parameters: all, and those of the input interface."""

        def size(tree: Params) -> int:
            return sum(leaf.size for leaf in jax.tree.leaves(tree))

        return size(self.shapes), size(self.shapes.get("input", {}))

    def flops_per_token(self) -> float:
        """Operations a training step needs for a token: 6 per weight of a matrix product, and
        attention's 12 L D / 2 per layer (causal), L being the context (PaLM, arXiv 2204.02311).
        """
        total, at_input = self.count()
        config = self.config
        attention_flops = 6 * config.num_layers * config.context_length * config.width
        return 6 * (total - at_input) + attention_flops
