"""Tests with a real engine, by the command line that a user types."""
