"""What a build reads from outside: release, source, pins and lock."""
