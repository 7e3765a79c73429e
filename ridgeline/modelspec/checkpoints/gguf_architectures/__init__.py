"""How llama.cpp stores each family: its keys as fields of a Hugging Face config."""
