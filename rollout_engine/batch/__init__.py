"""What one forward pass works on: ScheduleBatch (host, no torch) and ForwardBatch (device)."""
