"""Request bodies: how they are read, and bounds on what they may cost before any work is done."""
