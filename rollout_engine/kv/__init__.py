"""Page accounting of the KV pool: pure Python, no torch."""
