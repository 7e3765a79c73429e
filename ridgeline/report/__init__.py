"""Results for readers and other programs: JSON, files and HTML pages."""
