"""The embedded PyTorch engine: absorbed MLA over a paged row pool, one process, CPU or one GPU."""
