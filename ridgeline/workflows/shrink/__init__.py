"""Make a model smaller: prune."""
