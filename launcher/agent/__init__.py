"""What runs inside the image: starts ranks, redirects CUDA to the CPU, trains a GPT."""
