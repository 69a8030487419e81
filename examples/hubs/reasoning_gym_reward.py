"""The tasks of reasoning-gym 0.1.25 as problems, and its own score_answer() as the reward.

    python3 examples/hubs/reasoning_gym_reward.py chain_sum leg_counting > problems.jsonl

    trainer: grpo
    data: {jsonl: {path: problems.jsonl, prompt: "{question}"}}     # with a chat template: also chat: true
    rewards: [{name: command, run: python3 PATH/TO/cohort_reward.py reasoning_gym_reward.py, timeout: 10}]

98 of the 106 tasks give their own answer the score 1, also after JSON. The others: boxnet, graph_color, propositional_logic,
rubiks_cube and rush_hour have no answer of their own; arc_agi and rearc compare tuples, which JSON makes lists; composite needs
a list of data sets. game_of_life_halting gives every text the score 1. The timeout ends texts such as 9**9**9**9, which some
tasks evaluate.
"""
import functools
import json
import sys

import reasoning_gym
from reasoning_gym.utils import extract_answer

scorer = functools.cache(reasoning_gym.get_score_answer_fn)


def score(completion, entry):
    score_answer = scorer(entry["metadata"]["source_dataset"])
    try:
        return score_answer(extract_answer(completion) or completion.strip(), entry)  # <answer>...</answer>, else the whole text
    except (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError):
        return 0.0  # a text that the task cannot parse


def reward(completions, question, answer, metadata, **fields):
    return [score(completion, {"question": q, "answer": a, "metadata": m})
            for completion, q, a, m in zip(completions, question, answer, metadata)]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for entry in reasoning_gym.create_dataset(name, size=500, seed=0):
            print(json.dumps(entry))
