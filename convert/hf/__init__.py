"""The modelling file that an exported checkpoint carries."""
