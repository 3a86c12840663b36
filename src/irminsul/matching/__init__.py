"""Where has this text been seen? Matchers find runs of the prompt in cached rows."""
