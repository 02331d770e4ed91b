"""Between our checkpoints and Hugging Face's."""
