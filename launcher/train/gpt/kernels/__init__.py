"""Triton's part of a GPT-2, where torch's compiler leaves the card waiting."""
