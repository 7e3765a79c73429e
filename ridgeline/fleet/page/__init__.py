"""What a gateway shows of its fleet: a web page at `/`, and its data at `/ridgeline/fleet`."""
