"""Transform, quantize and pack new tokens into their pages, and into the 16-bit shadows of those pages."""
