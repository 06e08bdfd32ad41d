"""Carries images elsewhere: as a folder of checked files, or through a registry."""
