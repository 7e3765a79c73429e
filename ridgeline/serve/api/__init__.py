"""One file per group of routes. Each reads, translates, asks the engine, and words the answer."""
