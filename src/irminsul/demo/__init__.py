"""The demo: agent conversations played on two engines, with prefix caching alone and with shifted reuse."""
