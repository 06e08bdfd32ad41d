"""Does a row with a release build, import, train and checkpoint: each cell of the matrix, tried."""
