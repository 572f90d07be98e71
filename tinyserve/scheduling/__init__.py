"""Who computes what in the next step, decided in plain Python over integers.

Reading order: sequence.py (three counters), queue.py (who is next), budget.py (how much fits a step), preempt.py (who
makes room), scheduler.py (plan and commit). No torch anywhere: the whole folder is tested against a fake device.
"""
