"""The forms that request logs come in, a module each."""
