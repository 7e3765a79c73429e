"""Launch commands and manifests for a planned fleet."""
