"""The fidelity harness: what shifted reuse does to distributions and answers, path by path, task by task."""
