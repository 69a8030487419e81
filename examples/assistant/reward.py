"""Rewards a right and short answer. All arguments are lists of equal length; completions are texts."""
import re


def reward(completions, answers, **fields):
    scores = []
    for completion, answer in zip(completions, answers):
        numbers = re.findall(r"-?\d+", completion.replace(",", ""))
        right = bool(numbers) and numbers[-1] == answer
        scores.append(float(right) + (0.1 if len(completion) < 80 else 0))
    return scores
