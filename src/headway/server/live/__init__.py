"""The page at `/`: the batch as it runs."""
