"""Files for the operation of servers."""
