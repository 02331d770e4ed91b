"""AdamW, its learning rate, and which parameters it decays."""

import jax
import optax

from fixbin_jax.config import OptimizerConfig
from fixbin_jax.model import Params


def learning_rate(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Step -> learning rate: linear from 0 over warmup_steps, then a cosine to final_fraction."""
    warmup = optax.linear_schedule(0.0, config.learning_rate, max(config.warmup_steps, 1))
    decay = optax.cosine_decay_schedule(
        config.learning_rate, max(num_steps - config.warmup_steps, 1), config.final_fraction
    )
    return optax.join_schedules([warmup, decay], [config.warmup_steps])


def make_optimizer(
    config: OptimizerConfig, num_steps: int, axes: Params
) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW (Loshchilov & Hutter 2017, arXiv 1711.05101).

    Args:
      num_steps: the length of the schedule.
      axes: the logical axes of each parameter; those with two or more in a layer are matrices,
        and only they decay.
    """
    matrices = jax.tree.map(
        lambda a: len(a) - ("layer" in a) >= 2, axes, is_leaf=lambda a: isinstance(a, tuple)
    )
    adamw = optax.adamw(
        learning_rate(config, num_steps),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=matrices,
    )
    if not config.clip_norm:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)
