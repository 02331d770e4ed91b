"""Language models whose input side has no trained table, in JAX."""
