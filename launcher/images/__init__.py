"""From a row of the matrix to an image, and images elsewhere."""
