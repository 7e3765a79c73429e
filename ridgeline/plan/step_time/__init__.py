"""Step times of a replica on given devices, and the latencies that follow from them."""
