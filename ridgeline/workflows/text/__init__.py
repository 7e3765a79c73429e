"""Text from an engine in this process: generations, streams and conversations."""
