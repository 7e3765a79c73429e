"""click's parameters from the option table, and sections of options from the command line."""
