"""Where a gateway learns of backends that come and go: a file, names in DNS."""
