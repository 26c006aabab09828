"""``specexport bench``: plain and speculative decoding side by side."""
