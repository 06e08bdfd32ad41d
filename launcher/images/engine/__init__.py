"""Container engines: find one, start a private one, make a base image where none can be pulled."""
