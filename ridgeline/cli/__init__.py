"""The `ridgeline` command. Thin: it reads flags, calls the parts, prints what they say."""
