"""Ways of applying a configuration to a server: a local process, a script, docker, Kubernetes,
Ray Serve, Slurm."""
