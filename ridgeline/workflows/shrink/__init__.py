"""Make a model smaller: prune, distill."""
