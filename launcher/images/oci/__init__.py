"""Images as bytes: archives, layouts, layers, and registries."""
