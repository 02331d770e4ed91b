"""What one step computes: the state, its update from a batch, and the loss on held-out text."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fixbin_jax.config import Config
from fixbin_jax.loss import cross_entropy_sum
from fixbin_jax.model import Params, Structure
from fixbin_jax.optimizer import learning_rate, make_optimizer
from fixbin_jax.sharding import Placement

# ids, targets: int32 [B, L]; mask: bool [B, L], the targets that count.
Batch = dict[str, jax.Array]


class State(NamedTuple):
    """Everything an update changes, but the position in the data.

    Attributes:
      step: int32 scalar, updates made.
      params: Params.
      optimizer: the optax state.
    """

    step: Any
    params: Params
    optimizer: Any


class Step:
    """A run's compiled functions.

    Attributes:
      structure: the decoder's structure.
      shapes: State of jax.ShapeDtypeStruct, each with its sharding.
    """

    def __init__(self, config: Config, place: Placement) -> None:
        self._config, self._place = config, place
        self.structure = Structure(config.model, config.compute, place)
        self._schedule = learning_rate(config.optimizer, config.train.num_steps)
        self._tx = make_optimizer(config.optimizer, config.train.num_steps, self.structure.axes)
        self.shapes = self._state_shapes()
        shardings = jax.tree.map(lambda shape: shape.sharding, self.shapes)
        # Donated: the new state takes the old one's memory.
        self.update = jax.jit(
            self._update, donate_argnums=0, out_shardings=(shardings, place.replicated)
        )
        self.evaluate = jax.jit(self._evaluate, out_shardings=place.replicated)

    def init(self, seed: int) -> State:
        """The state before the first update, with parameters drawn from a seed."""
        return self.start_from(self.structure.init(seed))

    def start_from(self, params: Params) -> State:
        """The state before the first update of given parameters."""
        shardings = jax.tree.map(lambda shape: shape.sharding, self.shapes.optimizer)
        optimizer = jax.jit(self._tx.init, out_shardings=shardings)(params)
        step = jax.device_put(jnp.zeros((), jnp.int32), self._place.replicated)
        return State(step, params, optimizer)

    def _state_shapes(self) -> State:
        params, whole = self.structure.shapes, self._place.replicated

        def put(shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

        optimizer = optax.tree.map_params(
            self._tx,
            lambda shape, param: put(shape, param.sharding),
            jax.eval_shape(self._tx.init, params),
            params,
            transform_non_params=lambda shape: put(shape, whole),
        )
        return State(jax.ShapeDtypeStruct((), jnp.int32, sharding=whole), params, optimizer)

    def _loss_sum(self, params: Params, batch: Batch) -> jax.Array:
        decoder = self.structure.decoder(params)
        head = decoder.head
        return cross_entropy_sum(
            decoder.hidden(batch["ids"]),
            head.weight[...],
            None if head.bias is None else head.bias[...],
            batch["targets"].reshape(-1),
            batch["mask"].reshape(-1),
            self._config.compute.loss_rows,
            self._place,
        )

    def _evaluate(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Sum of the loss over counted targets, and their number."""
        return self._loss_sum(params, batch), batch["mask"].sum()

    def _update(self, state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        """The next state, and the loss (nats per target), gradient norm and learning rate."""
        loss_sum, gradients = self._gradients(state.params, batch)
        targets = jnp.maximum(batch["mask"].sum(), 1).astype(jnp.float32)
        gradients = jax.tree.map(lambda g: g / targets, gradients)
        updates, optimizer = self._tx.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": loss_sum / targets,
            "grad_norm": optax.tree.norm(gradients),
            "learning_rate": self._schedule(state.step),
        }
        return State(state.step + 1, params, optimizer), metrics

    def _gradients(self, params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        """The loss summed over the batch's counted targets, and that sum's gradients."""
        loss_and_gradients = functools.partial(jax.value_and_grad(self._loss_sum), params)
        parts = self._config.train.micro_batches
        if parts == 1:
            return loss_and_gradients(batch)

        def split(x: jax.Array) -> jax.Array:
            # Part m takes rows m, m + parts, ...: every device keeps its own rows.
            x = x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)
            return self._place.constrain(x, (None, "batch"))

        def add(total: Any, part: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, loss_and_gradients(part)), None

        zeros = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params))
        return jax.lax.scan(add, zeros, jax.tree.map(split, batch))[0]
