"""From folders of pictures to batches of cached tensors. Only `cache`, `encode` and `stream` need torch."""
