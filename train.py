"""Trains the model a config describes: python train.py --config=FILE --workdir=DIR."""

from absl import flags

from fixbin_jax import cli, trainer
from fixbin_jax.config import Config
from fixbin_jax.config_dict import from_mapping


def define_flags(fv: flags.FlagValues) -> None:
    """Registers the command's flags."""
    cli.define_config(fv)
    flags.DEFINE_string(
        "workdir",
        None,
        "Run folder. What it holds of this run is continued.",
        required=True,
        flag_values=fv,
    )
    flags.DEFINE_boolean(
        "change_config",
        False,
        "Go on in a run folder that was used with another config.",
        flag_values=fv,
    )


def main(fv: flags.FlagValues) -> None:
    """Trains, with what a person sees printed on the way."""
    config = from_mapping(Config, cli.get_config(fv))
    trainer.train(config, fv.workdir, fv.change_config)


if __name__ == "__main__":
    cli.run(main, define_flags)
