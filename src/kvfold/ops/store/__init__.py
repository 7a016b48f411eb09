"""Transform new tokens, pack them into their pages, and write them raw to rings."""
