"""A model's weights without torch: Megatron's checkpoints, and Hugging Face's folders."""
