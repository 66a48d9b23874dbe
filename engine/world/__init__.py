"""The invented world, what is made of it (questions, transcripts, a judge, base models), random models, and the demo.

Other invented data may come in; nothing that a run with real data needs.
"""
