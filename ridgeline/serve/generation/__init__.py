"""One HTTP request to the engine and back: submit, stream or collect, respond."""
