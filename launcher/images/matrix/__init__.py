"""What can be built: the matrix of base images and Megatron releases, its lock, its Dockerfiles."""
