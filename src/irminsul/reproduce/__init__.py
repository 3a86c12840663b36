"""The measurements of the Irminsul paper (arXiv 2605.05696v1), run again with this code; see `command`."""
