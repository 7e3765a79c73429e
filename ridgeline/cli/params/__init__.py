"""From the option table to click's parameters, and from what was typed to sections of options."""
