"""Several processes that compute one model: tensor, pipeline and expert parallelism."""
