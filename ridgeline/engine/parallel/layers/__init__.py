"""The layers of one rank: linears, experts, attention and whole blocks that exchange parts."""
