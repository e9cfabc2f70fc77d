"""The engine: the loop over steps, and what turns text into requests and tokens back into text."""
