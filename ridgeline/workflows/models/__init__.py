"""Models as a user sees them: what is downloaded, and what would run here."""
