"""The page at `/`: chat, live metrics, batches and the configuration, without a build step."""
