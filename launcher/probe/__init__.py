"""What is in an image and what works there, one fact at a time."""
