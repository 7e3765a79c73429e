"""Several processes that compute one model: tensor, pipeline, expert and context parallelism."""
