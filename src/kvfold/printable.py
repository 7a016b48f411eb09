"""What foreign files say, in messages for people."""


def printable(said: object, most: int = 500) -> str:
    """One line of at most `most` characters, and none that a terminal would obey."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(said)).split())
    return line if len(line) <= most else f"{line[: most - 2]} …"
