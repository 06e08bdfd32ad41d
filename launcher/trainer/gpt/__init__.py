"""A GPT trained with Megatron-Core: `python3 -m launcher.trainer.gpt`."""
