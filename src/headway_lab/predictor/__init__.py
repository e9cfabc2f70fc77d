"""Training of a length predictor from a traffic log."""
