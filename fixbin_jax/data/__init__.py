"""Text to batches: sources, tokenizers, corpora held in memory, and the grain pipeline."""
