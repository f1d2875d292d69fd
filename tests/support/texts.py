"""Text to predict."""

from __future__ import annotations

ENGLISH = """The lighthouse keeper had counted ships for thirty years. Every evening he climbed the stairs, lit the lamp
and wrote down what passed: the name of the vessel if he could read it, its direction, the weather. Nobody had
ever asked for these notes. When the harbour was closed and the last ferry had gone, a young woman came from
the university and wanted to know how often fog had kept the fishing boats at home. He brought her the first
of forty books. It took them a whole winter to copy the figures into tables, and in spring they knew something
that no one had known before: the fog had moved. It came earlier each year, by about a day and a half, and it
stayed longer. Water in the bay had become warmer, she explained, and warm air over cold currents turns into
fog. The boats that once waited a week in March now waited two in February. In a computer program the same
question would take a few seconds. First, read the file line by line. Then split each line at the comma,
convert the second field to a number, and add it to the sum for its month. Finally, divide by the number of
years and print the result. The keeper looked at the curve on the screen for a long time."""
