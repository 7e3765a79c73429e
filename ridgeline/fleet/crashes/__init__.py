"""Which requests crash servers, and which were only there."""
