"""What is new upstream against the matrix, found and proposed."""
