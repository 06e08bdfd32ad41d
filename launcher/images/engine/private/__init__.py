"""A container engine of our own, from the distribution's packages, and a base for it."""
