"""Builds the image of a row: fetch, patch, context, build without network, checks, tags."""
