"""A short text of our own, of several kinds: what a build looks at before it calls a quantised bundle good."""

SAMPLE = """\
The harbour wakes before the town does. By five the first boats are back, their decks slick with scales, and the
gulls follow them in as if they were owed something. On the quay a woman in a yellow coat counts crates aloud: eleven,
twelve, thirteen. She has done this every morning for thirty years, and she has never once been wrong by more than one.

Water expands when it freezes, which is unusual among liquids. Its molecules settle into an open lattice that takes
more room than the loose crowd they form when warm, so ice is lighter than the water it came from and floats on it. If
it sank instead, lakes would freeze from the bottom up, and few fish would live through the winter.

def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

Question: A train leaves at 9:40 and arrives at 11:15. How long is the journey?
Answer: From 9:40 to 10:40 is one hour, and from 10:40 to 11:15 is 35 minutes, so the journey takes 1 hour and 35
minutes.

To repot a plant, choose a pot that is slightly larger than the old one, put some fresh soil at the bottom, loosen the
roots with your fingers, and set the plant so that its base is as deep as it was before. Fill the gaps, press the soil
down gently, and give it enough water that some of it runs out below.
"""
