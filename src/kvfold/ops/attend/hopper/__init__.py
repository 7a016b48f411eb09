"""Decode attention for Hopper in Gluon: a kernel for integers and one for codebooks."""
