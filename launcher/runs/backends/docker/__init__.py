"""The backend of a Docker-compatible engine."""
