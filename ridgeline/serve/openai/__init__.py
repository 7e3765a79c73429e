"""OpenAI's API: completions, chat completions, responses, embeddings, models."""
