"""Learning from a traffic log to tell long answers from short ones beforehand."""
