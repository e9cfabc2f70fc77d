"""Prompts as people send them: questions, code, lists, stories, other scripts, very short and rather long."""

from __future__ import annotations

PASSAGE = (
    "The tram line was laid in 1896, when the town had nine thousand people and one hotel. It ran from the harbour "
    "to the brickworks, a little under four kilometres, and the fare was a penny in either direction. For the first"
    " winter the cars were drawn by horses, because the power station had not been finished; the drivers complained"
    " of the hill by the church, and the council answered that the hill had been there before them. When the "
    "current came at last the horses were sold at auction, all but one, a grey mare who would not leave the depot "
    "and was kept there until she died. The line made money in every year but two. In 1931 the brickworks closed, "
    "and with them went a third of the passengers; the company bought buses on credit, ran them beside the trams "
    "for a year and a half, and found that people who had complained of the noise of the one now complained of the "
    "smell of the other. The last car ran on a wet Sunday in March. So many wanted to be on it that it made the "
    "journey four times."
)

PROMPTS: tuple[str, ...] = (
    "The capital of France is",
    "Hello",
    "1, 1, 2, 3, 5, 8,",
    "def quicksort(items):\n    ",
    "Once upon a time, in a village by the sea,",
    "Water boils at a temperature of",
    "The three primary colours are",
    "Translate to French: Good morning, how are you?\nFrench:",
    "Q: What is the largest planet in the solar system?\nA:",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "Dear hiring manager,\n\nI am writing to apply for",
    "The recipe needs two eggs, a cup of flour and",
    "import numpy as np\n\n# Compute the mean of each column\n",
    "To be, or not to be, that is the",
    "In 1969, the first human being to walk on the Moon was",
    "List five animals that live in the desert:\n1.",
    "The quick brown fox",
    "x = 3\ny = 4\nprint((x**2 + y**2) ** 0.5)  # prints",
    "A haiku about autumn rain:\n",
    "Photosynthesis is the process by which plants",
    "The opposite of hot is cold. The opposite of up is",
    "Summary of the meeting on Tuesday:\n- The budget was",
    "<html>\n<head>\n<title>My page</title>",
    "Der schnellste Weg, eine Sprache zu lernen, ist",
    "La biblioteca estaba cerrada porque",
    "Emoji say more than words: \U0001f600\U0001f680",
    "    \n\n  indented and lonely",
    "If a train leaves at 9:40 and arrives at 11:05, the journey takes",
    "The patient reported a mild headache and was advised to",
    '{"name": "Ada", "born": 1815, "known_for": ',
    "He opened the letter, read it twice, and then",
    "Newton's second law says that force equals",
    "Three reasons to write tests before code:\n",
    # A little short of 256 tokens, where the CPU kernels begin another segment of keys: its answer crosses that bound.
    f"Here is a passage from a history of the town and its trams:\n\n{PASSAGE}\n\nIn one sentence, this text is about",
    PASSAGE[:600] + "\n\nQuestion: Why were the first cars drawn by horses?\nAnswer:",
    "Continue the story.\n\n" + PASSAGE[300:900],
)
