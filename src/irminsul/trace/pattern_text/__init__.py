"""What the synthetic patterns are made of: texts of our own, and the standard library of the running Python.

``coding_agent_*.txt`` and ``coding_tools.json``: system prompt and tools of a coding agent. ``archive.txt``: system
prompt of an assistant that answers from retrieved documents. ``library.py`` reads the library; ``conversation.py``
makes an agent's conversation about it.
"""
