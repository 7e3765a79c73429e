"""The page at `/`: chat, live metrics, batches and the resolved configuration, without a build step."""
