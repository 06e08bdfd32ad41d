"""The docker compose backend."""
