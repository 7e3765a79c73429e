"""Send loads to an engine or a server, and monitor them during the run."""
