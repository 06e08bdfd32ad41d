"""What every room uses: files, trust, errors, names, settings. It knows nothing of Megatron."""
