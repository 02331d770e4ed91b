"""A small model on the text that Python ships: minutes on two CPU cores.

Trained by `make train`. A character is a token here, and its id, its code point, enters the model
as 16 bits: there is no input table.
"""

from ml_collections import ConfigDict

from fixbin_jax.config import Config
from fixbin_jax.config_dict import to_config_dict


def get_config() -> ConfigDict:
    """The run."""
    config = to_config_dict(Config())

    config.model.width = 128
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.context_length = 128

    config.model.input.zero_ids = (57_344,)  # the tokenizer's padding, as in the paper

    config.train.num_steps = 420
    config.train.batch_size = 4
    config.train.eval_interval = 105
    config.train.eval_batches = 16

    config.compute.loss_rows = 256

    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup_steps = 50

    config.sample.prompt = '    """Return the '
    config.sample.temperature = 0.5
    return config
