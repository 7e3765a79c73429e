"""The page at `/`: chat, live figures, batches and the resolved configuration, without a build."""
