"""Times of operators measured on GPUs, as an alternative to the analytic parts of a step."""
