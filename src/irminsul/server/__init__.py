"""The OpenAI-compatible server over one engine; ``irminsul.server.app.serve`` runs it."""
