"""Distilling SmolLM2-135M-Instruct into its DeepSeek-V2 form; not part of the package. README.md says how."""
