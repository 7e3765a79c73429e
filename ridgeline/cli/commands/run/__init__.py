"""Commands that run a model: serve, chat, generate, batch."""
