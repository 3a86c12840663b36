"""Position-independent KV reuse for Multi-head Latent Attention (MLA), beside an exact-prefix cache."""

__version__ = "0.1.0"
