"""Where Megatron raises a message."""


def find(text: str) -> str:
    return ""
