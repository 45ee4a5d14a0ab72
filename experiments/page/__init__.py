"""How do results become the page of verdicts? What it shows, what the results say, and how that is written and drawn."""
