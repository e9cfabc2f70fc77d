"""The OpenAI API: requests in, answers and streams out."""
